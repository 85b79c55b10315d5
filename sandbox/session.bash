# One session: evaluates commands in this shell, so that its directory, variables, functions and jobs
# last. Reads them from descriptor 198, which they cannot use, and answers on descriptor 199, the
# pipe of their output, when each has ended. SIGINT leads back to the loop, as in a terminal: the
# trap breaks all loops, this one too, which then begins anew one evaluation deeper.
__t1_busy=0 __t1_status=0 __t1_last=0
__t1_again() { builtin return "$__t1_last"; } # so that $? is the last command's
__t1_answer='{
    __t1_busy=0
    builtin read -r -u 198 __t1_nonce
    for ((__t1_try = 0; __t1_try < 2000; __t1_try++)); do # again where the pipe is non-blocking
        builtin printf "%s done %d %s\0" "$__t1_nonce" "$__t1_status" "$PWD" >&199 && builtin break
    done
} 2>/dev/null'
__t1_loop='
trap "((__t1_busy)) && __t1_status=130 && builtin break 1000 2>/dev/null" INT # bash may lose it
while { ((!__t1_busy)) || builtin eval "$__t1_answer" # after a command that is "continue"
    IFS= builtin read -r -u 198 __t1_size &&
    IFS= LC_ALL=C builtin read -r -N "$__t1_size" -u 198 __t1_command || builtin exit; } 2>/dev/null; do
    __t1_last=$__t1_status __t1_status=0 __t1_busy=1
    __t1_again
    builtin eval "$__t1_command" 198<&- 199>&-
    __t1_status=$?
    builtin eval "$__t1_answer"
done
builtin eval "$__t1_answer"
builtin eval "$__t1_loop"'
unset text
# SETUP
builtin eval "$__t1_loop"

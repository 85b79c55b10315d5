# The first process of every sandbox: starts shells ("sessions"), passes commands on, stops them.
#
# Requests come on standard input and end with it: then this process ends, and with it, as process 1
# of its namespace, everything in the sandbox. Answers go to standard output, where the output of the
# commands goes too, as "NONCE KIND STATUS REST\0". The nonce is random, belongs to one request, and
# reaches a session only when its command has ended, so that no output can hold it.
# Only builtins are used: it goes on when the agent has deleted every program.

[[ $$ == 1 ]] || exit 1 # it kills every process it can see
shopt -s execfail
trap : PIPE # a handler, not "ignore", which every command would inherit
exec 2>/dev/null 199>&1
declare -A shell requests running before

answer() { # NONCE TEXT; tried again where a command has made the pipe non-blocking
    local tries
    for ((tries = 0; tries < 2000; tries++)); do
        printf '%s %s\0' "$1" "$2" && return
    done
}

payload() { IFS= LC_ALL=C read -r -N "$1" text || exit 0; }

become_session() { # SIZE-OF-SCRIPT [USER]; standard input is the session's request pipe
    local other start='IFS= LC_ALL=C read -r -N "$1" -u 198 text; set --; eval "$text"'
    for other in "${requests[@]}"; do exec {other}>&-; done
    exec {never}>&-
    exec 198<&0 0</dev/null 1>&199
    if [[ -n $2 ]]; then
        export USER=$2 LOGNAME=$2 HOME
        HOME=$(getent passwd "$2") && HOME=${HOME%:*} HOME=${HOME##*:}
        exec setpriv "--reuid=$2" "--regid=$(id -g "$2")" --init-groups \
            bash --norc --noprofile -c "$start" bash "$1" 2>&1
        exit 126 # never as another user than the one asked for
    fi
    ! type -P bash >/dev/null || exec bash --norc --noprofile -c "$start" bash "$1" 2>&1
    trap - PIPE # there is no bash any more: go on as this one
    exec 2>&1
    set -- "$1"
    eval "$start"
    exit
}

do_open() { # NONCE SESSION SIZE [USER]: the payload is the session's script
    local fd
    payload "$3"
    coproc session { become_session "$3" "${4-}"; }
    exec {fd}>&"${session[1]}" {session[1]}>&- {session[0]}<&-
    shell[$2]=$! requests[$2]=$fd
    printf '%s' "$text" >&"$fd"
    answer "$1" "ok 0 $!"
}

do_run() { # NONCE SESSION SIZE: the payload is the command
    payload "$3"
    if [[ -z ${shell[$2]-} ]] || ! kill -0 "${shell[$2]}"; then
        forget "$2"
        answer "$1" "absent 0 "
        return
    fi
    running[$2]=$1
    read -r "before[$2]" <"/proc/${shell[$2]}/task/${shell[$2]}/children" || :
    if (($3 < 2048)); then
        printf '%s\n%s%s\n' "$3" "$text" "$1" >&"${requests[$2]}"
    else # more than a pipe may hold: a session that does not read must not stop this process
        printf '%s\n%s%s\n' "$3" "$text" "$1" >&"${requests[$2]}" &
    fi
}

do_done() { unset "running[$2]"; } # NONCE SESSION: the answer of its command has arrived

descendants() { # PID...: adds every process below these to `found`
    local pid child children
    for pid; do
        for children in "/proc/$pid/task/"*/children; do
            read -r children <"$children" || :
            for child in $children; do
                found+=("$child")
                descendants "$child"
            done
        done
    done
}

started() { # SESSION: sets `found` to what the session started since its command began
    local pid child=
    found=()
    read -r child <"/proc/${shell[$1]}/task/${shell[$1]}/children" || :
    for pid in $child; do
        [[ " ${before[$1]-} " == *" $pid "* ]] && continue
        found+=("$pid")
        descendants "$pid"
    done
}

do_interrupt() { # NONCE SESSION SIGNAL: the shell gets INT only
    started "$2"
    # The shell first: it returns to its loop once the child it waits for has ended.
    [[ $3 != INT ]] || kill -s INT "${shell[$2]}"
    ((${#found[@]} == 0)) || kill -s "$3" "${found[@]}"
}

do_kill() { # NONCE SESSION: its shell is killed too, which is reported as the end of its command
    started "$2"
    kill -KILL "${shell[$2]}" "${found[@]}"
}

do_close() { # NONCE SESSION: its shell ends; what it left in the background goes on
    forget "$2"
    answer "$1" "ok 0 "
}

do_end() { # NONCE: kills every process but this one
    local name others tries
    for name in "${!shell[@]}"; do forget "$name"; done
    for ((tries = 0; tries < 500; tries++)); do
        kill -KILL -1
        others=(/proc/[0-9]*)
        ((${#others[@]} > 1)) || break
        read -r -t 0.01 -u "$never" || :
    done
    answer "$1" "ok $((${#others[@]} - 1)) "
}

do_ping() { answer "$1" "ok 0 "; }

forget() { # SESSION
    local fd=${requests[$1]-}
    [[ -z $fd ]] || exec {fd}>&-
    unset "shell[$1]" "requests[$1]" "running[$1]" "before[$1]"
}

reap() { # reports sessions that ended in the middle of a command
    local name pid status nonce
    for name in "${!running[@]}"; do
        pid=${shell[$name]} nonce=${running[$name]}
        if ! kill -0 "$pid"; then
            wait "$pid"
            status=$?
            forget "$name"
            answer "$nonce" "gone $status "
        fi
    done
}

exec {never}<> <(:) # a pipe that this process holds at both ends: reading it only waits
ulimit -c 0
line=
while :; do
    IFS= read -r -t 0.25 part
    status=$?
    line+=$part
    if ((status > 128)); then
        reap
        continue
    fi
    ((status == 0)) || exit 0 # whoever made this sandbox has gone
    set -f
    words=($line)
    set +f
    line=
    "do_${words[0]}" "${words[@]:1}"
done

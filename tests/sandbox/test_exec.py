"""What a command in a sandbox survives, on both back ends, with real processes."""

import asyncio
import os
import time

import psutil
import pytest

from sandbox import cgroups
from sandbox.base import TIMEOUT_EXIT_CODE, ExecResult, InfraError, SandboxBrokenError

MIB = 1 << 20
FORKS = """
import os, time
count = 0
try:
    while True:
        os.fork() or (time.sleep(300), os._exit(0))
        count += 1
except BlockingIOError:
    print(count)
"""
GRAB = "python3 -c \"x = b'x' * (600 << 20); print('got', 'it')\""


def outcome(result: ExecResult) -> tuple[str, int]:
    assert not result.timed_out
    return result.output, result.exit_code


async def processes(box) -> list[str]:
    """Command lines inside, without the first process and the shell that lists them."""
    listed = await box.exec_once("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done",
                                 timeout_s=20)  # fmt: skip
    return [line for line in listed.output.splitlines() if line and "--norc" not in line]


async def wait_for_processes(box, expected: list[str]) -> None:
    """What a command left in the background is a shell until it has become its program."""
    try:
        async with asyncio.timeout(20):
            while sorted(await processes(box)) != expected:
                await asyncio.sleep(0.05)
    except TimeoutError:
        assert sorted(await processes(box)) == expected


def with_command_line(text: str) -> list[psutil.Process]:
    """Processes of this machine, those in sandboxes included."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if text in " ".join(p.info["cmdline"] or ())]


def test_a_session_keeps_directory_variables_functions_jobs_and_status(boxes):
    async def use(box):
        commands = [
            ("cd /tmp; export A=5; B=6; f() { echo f $1; }; declare -A m=([k]=v); false", "", 1),
            ("echo $? $PWD $A $B ${m[k]}; f 7", "1 /tmp 5 6 v\nf 7\n", 0),
            ("sleep 300 &", "", 0),
            ("jobs | grep -c Running", "1\n", 0),
            ("exec >log; echo hidden", "", 0),
            ("exec >&2; cat log", "hidden\n", 0),
            ("if", "", 2),  # a syntax error; its message is checked for elsewhere
            ("(set -x; : traced) 2>&1 | tr -d +", " : traced\n", 0),
            ("continue", "", 0),
            ("break", "", 0),
            ("nosuch |& cut -d: -f1,3-", "bash: nosuch: command not found\n", 0),
        ]
        for command, output, exit_code in commands:
            done = await box.exec(command, timeout_s=10)
            assert done.exit_code == exit_code, done
            if command != "if":
                assert done.output == output
        await box.exec("exit 3", timeout_s=10)
        assert outcome(await box.exec("pwd", timeout_s=10)) == ("/tmp\n", 0)

    boxes.run(use)


def test_a_child_that_keeps_standard_output_open_holds_nothing_up(boxes):
    async def use(box):
        done = await box.exec("sleep 300 & echo done", timeout_s=20)
        assert outcome(done) == ("done\n", 0)
        assert done.seconds < 2
        await wait_for_processes(box, ["sleep 300 "])

    boxes.run(use)


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM; sleep 999",
        "trap '' TERM INT; bash -c 'trap \"\" TERM INT; sleep 999; sleep 998'",
        "while :; do :; done",
        "trap '' INT; while :; do :; done",
        "for i in 1 2 3 4; do sleep 999; done; sleep 999",
        "(setsid sleep 999 | cat) | cat",
    ],
)
def test_a_command_that_will_not_end_is_ended(boxes, command):
    async def use(box):
        await box.exec("sleep 300 & cd /tmp", timeout_s=10)
        done = await box.exec(command, timeout_s=2)
        assert done.timed_out and done.exit_code == TIMEOUT_EXIT_CODE
        assert 2 <= done.seconds < 5
        assert outcome(await box.exec("pwd", timeout_s=10)) == ("/tmp\n", 0)
        await wait_for_processes(box, ["sleep 300 "])  # of an earlier command: it goes on

    boxes.run(use)


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [("yes | head -c 300M", 0), ("head -c 2G /dev/zero; exit 7", 7), ("yes", TIMEOUT_EXIT_CODE)],
)
def test_endless_output_keeps_head_tail_and_exit_code_in_bounded_memory(boxes, command, exit_code):
    async def use(box):
        await box.exec(": warm", timeout_s=10)
        process = psutil.Process()
        before, peak = process.memory_info().rss, 0
        limit_s = 3 if command == "yes" else 60
        framed = f"echo first; ({command}); code=$?; echo last; (exit $code)"
        running = asyncio.create_task(box.exec(framed, timeout_s=limit_s))
        while not running.done():
            await asyncio.sleep(0.05)
            peak = max(peak, process.memory_info().rss)
        done = await running
        assert done.exit_code == exit_code
        assert done.truncated and len(done.output) < 1.1 * MIB
        assert done.output.startswith("first\n")
        assert command == "yes" or done.output.endswith("last\n")
        assert peak - before < 50 * MIB

    boxes.run(use)


def test_bytes_that_are_no_text_arrive_as_replacement_characters(boxes):
    async def use(box):
        done = await box.exec(r"printf 'a\xff\xfe\0b\xc3\xa9\r\n\033[1m'", timeout_s=10)
        assert outcome(done) == ("a\ufffd\ufffd\0bé\r\n\x1b[1m", 0)
        done = await box.exec("echo a\0b", timeout_s=10)
        assert done.exit_code == 2 and "NUL" in done.output

    boxes.run(use)


def test_a_reader_of_standard_input_gets_its_end(boxes):
    async def use(box):
        assert outcome(await box.exec("cat; read x; echo $?", timeout_s=5)) == ("1\n", 0)

    boxes.run(use)


def test_a_heredoc_of_200_kb_arrives_whole(boxes):
    text = "".join(f"line {i} ' \" $HOME `x` \\ é\n" for i in range(7000))
    assert len(text.encode()) > 200_000

    async def use(box):
        done = await box.exec(f"cat > big <<'END'\n{text}END\ncksum <big", timeout_s=20)
        assert done.exit_code == 0
        again = await box.exec("cat big", timeout_s=20)
        assert again.output == text

    boxes.run(use)


def test_output_cannot_forge_the_end_of_a_command(boxes):
    """Everything a command can read of the protocol is printed back, and nothing comes of it."""
    spy = "cat /proc/$$/cmdline /proc/$$/environ; set; printf 'done 0 /\\0'; cat /proc/self/fd/198"

    async def use(box):
        done = await box.exec(f"({spy}) 2>/dev/null; echo end; (exit 9)", timeout_s=10)
        assert done.exit_code == 9 and done.output.endswith("end\n")
        assert outcome(await box.exec("echo next", timeout_s=10)) == ("next\n", 0)

    boxes.run(use)


def test_a_fork_bomb_stays_within_its_limit_and_ends_with_the_trial(boxes):
    async def use(box):
        await box.exec("bomb() { bomb | bomb & }; bomb 2>/dev/null; sleep 1", timeout_s=5)
        inside = [p for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie"]
        assert len(inside) < before + 64 + 40  # the limit, and what else this machine does
        await box.end_processes()
        assert outcome(await box.exec("echo alive", timeout_s=10)) == ("alive\n", 0)
        assert await processes(box) == []

    before = len(psutil.pids())
    boxes.run(use)


def test_a_full_disk_is_the_sandboxes_own(boxes):
    async def use(box):
        done = await box.exec("head -c 300M /dev/zero > big; stat -c %s big", timeout_s=30)
        assert int(done.output.split()[-1]) <= 64 * MIB
        assert outcome(await box.exec("rm big; echo x >f; cat f", timeout_s=10)) == ("x\n", 0)

    boxes.run(use)


def test_many_files_that_fill_a_disk_end_a_container(boxes):
    """Each file is within its limit, their sum is not."""
    fill = "for i in $(seq 40); do head -c 10M /dev/zero > f$i || exit 5; done; sleep 20; exit 6"

    async def use(box):
        if boxes.kind == "local":
            assert (await box.exec(f"({fill}) 2>/dev/null", timeout_s=30)).exit_code == 5
            return
        with pytest.raises(SandboxBrokenError, match="wrote more than its 64 MB"):
            await box.exec(f"({fill})", timeout_s=30)

    boxes.run(use)


def test_memory_is_limited(boxes):
    async def use(box):
        done = await box.exec(GRAB, timeout_s=30)
        assert done.exit_code != 0 and "got it" not in done.output
        assert outcome(await box.exec("echo alive", timeout_s=10)) == ("alive\n", 0)

    boxes.run(use)


@pytest.mark.parametrize("kind", ["local"])
def test_without_control_groups_processes_and_their_memory_are_limited(boxes, monkeypatch):
    async def use(box):
        done = await box.exec(f"python3 -c '{FORKS}'", timeout_s=20)
        assert 40 < int(done.output) <= 64
        await box.end_processes()
        done = await box.exec(GRAB, timeout_s=30)
        assert "MemoryError" in done.output

    monkeypatch.setattr(cgroups, "make_group", lambda name, limits: None)
    boxes.run(use)


def test_a_shell_outlives_the_programs_that_an_agent_deletes(boxes):
    async def use(box):
        await box.exec("rm -rf /tests /bin/sh /bin/bash /usr/bin/bash 2>/dev/null", timeout_s=20)
        assert outcome(await box.exec("echo $((6 * 7))", timeout_s=10)) == ("42\n", 0)
        await box.end_processes()
        assert outcome(await box.exec("echo again", timeout_s=10)) == ("again\n", 0)
        done = await box.exec("while :; do :; done", timeout_s=1)
        assert done.timed_out

    boxes.run(use)


def test_end_processes_leaves_nothing_of_the_agent(boxes):
    daemons = "trap '' TERM; for i in 1 2 3; do (setsid nohup sleep 99$i >/dev/null 2>&1 &); done"

    async def use(box):
        await box.exec(daemons, timeout_s=10)
        await wait_for_processes(box, ["sleep 991 ", "sleep 992 ", "sleep 993 "])
        await box.end_processes()
        assert await processes(box) == []
        done = await box.exec("echo ${A-unset} $PWD; type f", timeout_s=10, session="verifier")
        assert done.output.startswith("unset /app\n")

    boxes.run(use)


def test_a_cancelled_command_is_ended_and_the_next_one_is_itself(boxes):
    async def use(box):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await box.exec("echo stale; sleep 999; echo stale", timeout_s=100)
        assert outcome(await box.exec("echo fresh", timeout_s=10)) == ("fresh\n", 0)
        assert await processes(box) == []

    boxes.run(use)


def test_variables_and_directory_of_one_command_are_its_own(boxes):
    async def use(box):
        env = {"A": "x 'y' $HOME"}
        first = await box.exec("echo $A; pwd; exit 4", timeout_s=10, env=env, cwd="/tmp")
        assert (first.output, first.exit_code) == ("x 'y' $HOME\n/tmp\n", 4)
        once = await box.exec_once("echo $A; pwd; exit 5", timeout_s=10, env=env, cwd="/tmp")
        assert outcome(once) == ("x 'y' $HOME\n/tmp\n", 5)
        later = await box.exec("echo ${B-unset}; pwd", timeout_s=10, session="other", cwd="/")
        assert outcome(later) == ("unset\n/\n", 0)

    boxes.run(use)


def test_300_commands_in_one_trial_take_two_milliseconds_each(boxes):
    async def use(box):
        await box.exec("true", timeout_s=10)
        seconds = []
        for i in range(300):
            done = await box.exec(f"echo {i}", timeout_s=10)
            assert outcome(done) == (f"{i}\n", 0)
            seconds.append(done.seconds)
        assert sorted(seconds)[150] < 0.010  # on a busy machine, too

    boxes.run(use)


def test_sixteen_sandboxes_at_a_time_do_not_meet(boxes):
    async def use(*many):
        async def one(box, i):
            await box.exec(f"echo {i} > /tmp/mine; export I={i}", timeout_s=60)
            return (await box.exec("cat /tmp/mine; echo $I; ls /tmp", timeout_s=60)).output

        shown = await asyncio.gather(*(one(box, i) for i, box in enumerate(many)))
        assert shown == [f"{i}\n{i}\nmine\n" for i in range(len(many))]

    boxes.run(use, count=16 if boxes.kind == "local" else 4)


def test_a_stop_in_the_middle_of_a_command_leaves_no_process(boxes):
    mark = f"sleep 99{os.getpid()}"

    async def use(box):
        running = asyncio.create_task(box.exec(mark, timeout_s=100))
        await asyncio.sleep(0.5)
        assert with_command_line(mark)
        begin = time.monotonic()
        await box.stop()
        assert time.monotonic() - begin < 10
        with pytest.raises((InfraError, SandboxBrokenError, RuntimeError)):
            await running

    boxes.run(use)
    assert not with_command_line(mark)

"""A signal ends a command with its status and one line, wherever the process happens to be."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t1jax import interrupts

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]

IN_A_COLLECTOR_CALLBACK = """
import gc
def _xla_gc_callback(phase, details):
    if phase == "start":
        print("here", flush=True)
    time.sleep(0.5)
gc.callbacks.append(_xla_gc_callback)
gc.collect()
gc.callbacks.clear()
"""
IN_A_FINALIZER = """
class Slow:
    def __del__(self):
        print("here", flush=True)
        time.sleep(0.5)
Slow()
"""
IN_AN_IMPORT = """
sys.path.insert(0, sys.argv[1])
import slow
"""
IN_A_NEW_EVENT_LOOP = """
import asyncio
class Slow(asyncio.SelectorEventLoop):
    def _make_self_pipe(self):
        print("here", flush=True)
        time.sleep(0.5)
        super()._make_self_pipe()
class Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = Slow
asyncio.set_event_loop_policy(Policy())
asyncio.run(asyncio.sleep(20))
"""
BEFORE_A_COROUTINE_RUNS = """
import asyncio
def run(coroutine):
    print("here", flush=True)
    time.sleep(0.5)
run(asyncio.sleep(20))
"""
AT_WORK = 'print("here", flush=True)\n'
# Python only looks for a signal between two steps: one that comes just before a sleep waits for it.
WAIT = "for _ in range(200): time.sleep(0.1)\n"


@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize(
    "busy",
    [IN_A_COLLECTOR_CALLBACK, IN_A_FINALIZER, IN_AN_IMPORT, IN_A_NEW_EVENT_LOOP,
     BEFORE_A_COROUTINE_RUNS, AT_WORK],
    ids=["collector", "finalizer", "import", "event loop", "coroutine", "work"],
)  # fmt: skip
def test_a_signal_is_never_lost_and_cleans_up(tmp_path, busy, number, status):
    (tmp_path / "slow.py").write_text(
        'import time\nprint("here", flush=True)\ntime.sleep(0.5)\nDONE = True\n'
    )
    script = (
        "import sys, time\nfrom t1jax.interrupts import raised_on_signals\n"
        "with raised_on_signals():\n    try:\n"
        + "".join(f"        {line}\n" for line in busy.strip().splitlines())
        + f"        {WAIT}    finally:\n        print('clean', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "here\n"
    started = time.monotonic()
    process.send_signal(number)
    shown, noted = process.communicate(timeout=15)
    assert (process.returncode, shown, noted) == (status, "clean\n", "")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("after_s", [0.15, 0.5, 1.0])
def test_an_interrupted_command_says_so_and_leaves_nothing(tmp_path, after_s):
    source = Path(__file__).parent / "fixtures" / "ref-a"
    process = subprocess.Popen(
        [sys.executable, "-c", "from t1jax.cli import main; main()", "convert", source,
         tmp_path / "out"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    noted = process.communicate(timeout=60)[1]
    if process.returncode == 0:  # it was done before the signal came
        assert (tmp_path / "out" / "manifest.json").exists()
        return
    assert process.returncode in (143, -signal.SIGTERM)  # the second: before Python was up
    assert list(tmp_path.iterdir()) == []
    if process.returncode == 143:
        assert noted.splitlines()[-1].startswith("error: interrupted")
        assert "Traceback" not in noted


def test_handlers_are_as_before_after_the_block():
    before = signal.getsignal(signal.SIGINT)
    with interrupts.raised_on_signals():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before

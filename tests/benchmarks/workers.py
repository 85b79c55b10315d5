"""Timing in worker processes that take turns.

A worker prepares named tasks and then runs one when told to, so that A and B can alternate in two
processes. A worker is stopped (SIGSTOP) while it is not its turn: a thread pool that spins after
its last task takes no time from the other's. Only ratios of neighbouring runs are used.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ANSWER_S = 1200  # longest that a worker may take over one task
QUIET = 0.10  # share of the machine that others may use in a round that counts


# ---- inside a worker ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is timed. `before` is run ahead of it and not timed; `repeats` runs make one timing."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    repeats: int = 1
    warm_up: int = 2
    own_seconds: bool = False  # `run` returns how long the part that counts took

    @classmethod
    def in_a_row(cls, run: Callable[[], object]) -> "Task":
        """One of many like it: a run that is not timed comes right before.

        While a worker waits for its turn a virtual machine may give its free memory back; the first
        step after 5 s of waiting took twice as long as the next, all of it page faults.
        """
        return cls(run=run, before=run, warm_up=0)


def serve(tasks: dict[str, Callable[..., Task]], calls: dict[str, Callable[..., Any]]) -> None:
    """Answers commands from stdin, one JSON line each, until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    ready: dict[str, Task] = {}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": _obey(command, ready, tasks, calls)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def _obey(command, ready, tasks, calls):
    name, arguments = command["name"], command.get("arguments", {})
    if command["do"] == "call":
        return calls[name](**arguments)
    if command["do"] == "drop":
        return ready.pop(name) and None
    if command["do"] == "prepare":
        task = ready[name] = tasks[command["task"]](**arguments)
        for _ in range(task.warm_up):
            task.before()
            task.run()
        return None
    return _timed(ready[name])


def _timed(task: Task) -> dict[str, float]:
    """Seconds of one run; elapsed and CPU seconds with what came before it, all that this took."""
    cpu, begin = time.process_time(), time.perf_counter()
    task.before()
    start = time.perf_counter()
    told = [task.run() for _ in range(task.repeats)]
    end = time.perf_counter()
    cpu_s = time.process_time() - cpu
    seconds = sum(told) if task.own_seconds else end - start
    return {"seconds": seconds / task.repeats, "elapsed_s": end - begin, "cpu_s": cpu_s}


class PeakMemory:
    """Growth of this process's resident memory from here on, at its highest, in bytes."""

    def __init__(self) -> None:
        import ctypes
        import gc

        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self.baseline = _status_bytes("VmRSS")

    def growth(self) -> int:
        return _status_bytes("VmHWM") - self.baseline


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; this needs Linux")


# ---- in the parent ------------------------------------------------------------------------------


class Worker:
    """A process started from a script of this folder that calls `serve`; stopped between asks."""

    def __init__(self, script: str):
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "HF_HUB_OFFLINE": "1",
            # Both sides get huge pages: a step that takes gigabytes anew each time otherwise spends
            # a third of its time on the system's page faults (docs/model.md).
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        }
        environment.pop("XLA_FLAGS", None)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )

    def ask(self, do: str, name: str, **more: Any) -> Any:
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"do": do, "name": name} | more) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"worker {self.process.args} gave no answer in {ANSWER_S} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.process.args} ended with {self.process.wait()}")
        self.process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do} {name} {more} failed in the worker:\n{answer['error']}")
        return answer["value"]

    def prepare(self, name: str, task: str, **arguments: Any) -> Callable[[], "Timing"]:
        """Builds and warms up a task; what comes back times one run of it."""
        self.ask("prepare", name, task=task, arguments=arguments)
        return lambda: self.time(name)

    def time(self, name: str) -> "Timing":
        before = _busy_s()
        answer = self.ask("time", name)
        others_s = max(_busy_s() - before - answer["cpu_s"], 0.0)
        return Timing(answer["seconds"], others_s / (answer["elapsed_s"] * psutil.cpu_count()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def worker(script: str) -> Iterator[Worker]:
    """A worker for the length of a block."""
    started = Worker(script)
    try:
        yield started
    finally:
        started.close()


def _busy_s() -> float:
    """CPU seconds that anything used since boot; the host's theft counts as use."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float
    others: float  # share of the machine that other processes had meanwhile


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Timings of several tasks, taken in turns: round i of each are neighbours in time."""

    seconds: dict[str, list[float]]
    others: float  # median over the rounds used, of the busiest task in each
    noisy: int  # rounds left out because others used the machine

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, over: str) -> list[float]:
        """time(name) / time(over) of every round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[over], strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How many quiet rounds are wanted, and how long one comparison goes on trying for them."""

    rounds: int
    patience_s: float


def take_turns(timers: dict[str, Callable[[], Timing]], pace: Pace) -> Rounds:
    """Times A B C A B C ... until enough rounds were quiet or patience ends.

    There are always `pace.rounds` rounds: when too few were quiet the quietest are used, and
    `others` says so.
    """
    rounds: list[dict[str, Timing]] = []
    busiest = lambda one: max(t.others for t in one.values())  # noqa: E731
    end = time.monotonic() + pace.patience_s
    while len(rounds) < pace.rounds or (
        sum(busiest(one) <= QUIET for one in rounds) < pace.rounds and time.monotonic() < end
    ):
        wait_for_quiet(pace.patience_s / (2 * pace.rounds))
        rounds.append({name: timer() for name, timer in timers.items()})
    used = sorted(rounds, key=busiest)[: pace.rounds]
    return Rounds(
        {name: [one[name].seconds for one in used] for name in timers},
        statistics.median(map(busiest, used)),
        len(rounds) - len(used),
    )


def wait_for_quiet(patience_s: float) -> None:
    """Our workers are stopped meanwhile: whatever runs belongs to others."""
    end = time.monotonic() + patience_s
    while psutil.cpu_percent(interval=0.3) > 100 * QUIET and time.monotonic() < end:
        pass

"""What sandboxes cost, each figure beside a reference in the same run; the last line is JSON.

    python tests/benchmarks/sandboxes.py [--sandbox local|docker] [--quick]

A command's overhead is what a session adds to the command itself: `true` is a builtin, so all of
its time is ours. One-off commands are compared with the docker client's `docker exec`, a start
with a bare `bwrap` or `docker run`. Memory is the runner's own, over sandboxes one after another.
Trials (local): the oracle on a task whose verifier is one line of bash, 64 at once, verified in a
fresh sandbox: what is left is two starts, their copies and records. What bounds the rate is CPU.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from sandbox import task as tasks
from sandbox.agents import Oracle
from sandbox.base import BASE_IMAGE, Backend, Environment, Network, Sandbox, make_backend
from sandbox.pool import Gate, run_all
from sandbox.trial import Outcome, TrialResult, run_trial

COMMANDS, ONE_OFFS, STARTS = 300, 30, 20
BARE_BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "bash", "-c", "true"]


async def median_ms(count: int, call: Callable[[], Awaitable[object]]) -> float:
    """The median time of one call."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def reference_ms(count: int, command: list[str]) -> float:
    """The median time of a process of the reference tool."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


async def commands(backend: Backend, environment: Environment) -> dict[str, float]:
    """Overhead of a command in a session, and of one in a shell of its own."""
    async with backend.sandbox(environment) as box:
        await box.exec("true", timeout_s=10)
        figures = {
            "session_command_ms": await median_ms(COMMANDS, lambda: box.exec("true", timeout_s=10)),
            "one_off_ms": await median_ms(ONE_OFFS, lambda: box.exec_once("true", timeout_s=10)),
        }
        if backend.name == "docker":
            client = ["docker", "exec", box.name, "bash", "-c", "true"]
            figures["docker_exec_ms"] = await asyncio.to_thread(reference_ms, ONE_OFFS, client)
            figures["one_off_ratio"] = figures["one_off_ms"] / figures["docker_exec_ms"]
    return figures


async def starts(backend: Backend, environment: Environment, count: int) -> dict[str, float]:
    """Time to start and to stop one sandbox, and memory kept after many."""
    process = psutil.Process()
    began, stopped, before_bytes = [], [], 0
    for number in range(count):
        box: Sandbox = backend.sandbox(environment)
        begin = time.perf_counter()
        await box.start()
        began.append(time.perf_counter() - begin)
        await box.exec("true", timeout_s=10)
        begin = time.perf_counter()
        await box.stop()
        stopped.append(time.perf_counter() - begin)
        if number == count // 10:  # what is made once is there
            gc.collect()
            before_bytes = process.memory_info().rss
    gc.collect()
    return {
        "start_ms": 1e3 * statistics.median(began),
        "stop_ms": 1e3 * statistics.median(stopped),
        "sandboxes": count,
        "runner_growth_mb": (process.memory_info().rss - before_bytes) / 1e6,
    }


TRIVIAL = {
    "task.toml": '[verifier]\nenvironment_mode = "separate"\n'
    '[environment]\nnetwork_mode = "no-network"\nstorage_mb = 32\n[environment.local]\n',
    "instruction.md": "Write 1 to a.txt.",
    "environment/Dockerfile": f"FROM {BASE_IMAGE}\nCOPY files/ /app/\nWORKDIR /app\n",
    "environment/files/given.txt": "given\n",
    "solution/solve.sh": "echo 1 > /app/a.txt\n",
    "tests/test.sh": "grep -qx 1 /app/a.txt && echo 1 > /logs/verifier/reward.txt\n",
}


async def trials(backend: Backend, at_once: int = 64, count: int = 256) -> dict[str, float]:
    """Trials a second of the oracle, with so many at once."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "task"
        for name, text in TRIVIAL.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        task, results = tasks.load(root), list[TrialResult]()

        async def one(number: int) -> None:
            trial = Path(folder) / f"trial_{number}"
            results.append(await run_trial(task, Oracle(), backend, trial))

        begin = time.perf_counter()
        await run_all(range(count), one, Gate(at_once, disk=Path(folder)), at_once)
        seconds = time.perf_counter() - begin
    solved = sum(result.outcome is Outcome.solved for result in results)
    return {"trials_per_s": count / seconds, "trials_solved": solved / count}


async def measure(kind: str, quick: bool) -> dict[str, float]:
    backend = make_backend(kind)
    environment = Environment(name="b", image=BASE_IMAGE, local=True, network=Network.NONE)
    await backend.prepare(environment)
    figures = await commands(backend, environment)
    figures |= await starts(backend, environment, STARTS if quick else 200)
    if kind == "local":
        figures |= await trials(backend)
        figures["bare_bwrap_ms"] = await asyncio.to_thread(reference_ms, STARTS, BARE_BWRAP)
    else:
        bare = ["docker", "run", "--rm", "--network=none", BASE_IMAGE, "true"]
        figures["docker_run_ms"] = await asyncio.to_thread(reference_ms, 5, bare)
    await backend.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sandbox", choices=["local", "docker"], default="local")
    parser.add_argument("--quick", action="store_true", help=f"{STARTS} starts in place of 200")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.sandbox, arguments.quick))
    for name, figure in figures.items():
        print(f"{name:24} {figure:10.2f}", file=sys.stderr)
    rounded = {name: round(figure, 3) for name, figure in figures.items()}
    print(json.dumps({"sandbox": arguments.sandbox, "cores": os.cpu_count(), **rounded}))


if __name__ == "__main__":
    main()

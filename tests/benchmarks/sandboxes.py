"""What sandboxes cost, each figure beside a reference in the same run; the last line is JSON.

    python tests/benchmarks/sandboxes.py [--sandbox local|docker] [--quick]

A command's overhead is what a session adds to the command itself: `true` is a builtin, so all of
its time is ours. One-off commands are compared with the docker client's `docker exec`, a start
with a bare `bwrap` or `docker run`. Memory is the runner's own, over sandboxes one after another.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import psutil

from sandbox.base import BASE_IMAGE, Backend, Environment, Network, Sandbox, make_backend

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


async def measure(kind: str, quick: bool) -> dict[str, float]:
    backend = make_backend(kind)
    environment = Environment(name="b", image=BASE_IMAGE, local=True, network=Network.NONE)
    await backend.prepare(environment)
    figures = await commands(backend, environment)
    figures |= await starts(backend, environment, STARTS if quick else 200)
    if kind == "local":
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

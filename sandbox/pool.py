"""Many trials on one host: never more than asked for, and none while memory or disk is short.

Every wait has a deadline: a machine that stays full is an error that says so, not a hang.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from t1jax.errors import UserError

LOOK_AGAIN_S = 0.2
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What is free on this host, or has to be."""

    memory_mb: int
    disk_mb: int


LEAST_ROOM = Room(memory_mb=1024, disk_mb=2048)


def measure(disk: Path) -> Room:
    """What is free now: memory that can be had without swapping, and disk at this path."""
    return Room(memory_mb=_free_memory_mb(), disk_mb=shutil.disk_usage(disk).free // 2**20)


def _free_memory_mb() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    except FileNotFoundError:  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    raise RuntimeError("/proc/meminfo has no MemAvailable")


class Gate:
    """Lets at most `jobs` through at once, and nobody while the host has less than `least` free."""

    def __init__(
        self,
        jobs: int,
        *,
        disk: Path = Path("/"),
        least: Room = LEAST_ROOM,
        patience_s: float = 600.0,
        free: Callable[[Path], Room] = measure,
    ):
        if jobs < 1:
            raise ValueError(f"jobs = {jobs}; expected at least 1")
        self._places = asyncio.Semaphore(jobs)
        self._disk, self._least, self._patience_s, self._free = disk, least, patience_s, free

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place and for room, and holds the place while the block runs."""
        async with self._places:
            await self._room()
            yield

    async def _room(self) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            free = self._free(self._disk)
            short = [
                f"{name} {have} MB of {need} MB"
                for name, have, need in (
                    ("memory", free.memory_mb, self._least.memory_mb),
                    ("disk", free.disk_mb, self._least.disk_mb),
                )
                if have < need
            ]
            if not short:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"waited {self._patience_s:g} s for room: {', '.join(short)} free; free some, "
                    "or run fewer jobs"
                )
            await asyncio.sleep(LOOK_AGAIN_S)


async def run_all(
    items: Iterable[Item], work: Callable[[Item], Awaitable[None]], gate: Gate, jobs: int
) -> None:
    """Works on every item, `jobs` at a time; the first exception cancels the rest."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            async with gate.place():
                await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None

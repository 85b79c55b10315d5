"""A control group per local sandbox, where this process may make one: version 1 or 2.

Without one the limits of local.py hold for each process (memory) or the user inside (processes).
"""

import contextlib
import functools
import os
from pathlib import Path

from sandbox.base import Limits

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "t1jax-"
CPU_PERIOD_US = 100_000


class Group:
    """The directories, one per controller, that together limit one sandbox."""

    def __init__(self, directories: list[Path]):
        self.directories = directories

    def add(self, pid: int) -> None:
        """Moves a process; what it starts afterwards is in the group too."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes it; its processes must have ended."""
        for directory in self.directories:
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()


def make_group(name: str, limits: Limits) -> Group | None:
    """A group with these limits, or None where the machine's groups are not ours to change."""
    made: list[Path] = []
    try:
        for parent, settings in _controllers(limits):
            directory = parent / f"{PREFIX}{os.getpid()}-{name}"
            directory.mkdir()
            made.append(directory)
            for file, value in settings:
                (directory / file).write_text(value)
    except OSError:
        Group(made).remove()
        return None
    return Group(made) if made else None


def leftovers() -> list[Group]:
    """Groups of processes that are gone, anywhere on this machine; their sandboxes went as well."""
    found = []
    for directory in MOUNT.rglob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists() and not (directory / "cgroup.procs").read_text():
            found.append(Group([directory]))
    return found


def _controllers(limits: Limits) -> list[tuple[Path, list[tuple[str, str]]]]:
    memory_bytes = str((limits.memory_mb + limits.storage_mb) << 20)  # files are in memory too
    quota_us = int(limits.cpus * CPU_PERIOD_US)
    if (v2 := _version2()) is not None:
        cpu = ("cpu.max", f"{quota_us} {CPU_PERIOD_US}")
        settings = [("memory.max", memory_bytes), ("pids.max", str(limits.pids)), cpu]
        return [(v2, settings)]
    v1 = _version1()
    wanted = {
        "memory": [("memory.limit_in_bytes", memory_bytes)],
        "pids": [("pids.max", str(limits.pids))],
        "cpu": [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))],
    }
    return [(v1[name], files) for name, files in wanted.items() if name in v1]


@functools.cache
def _version1() -> dict[str, Path]:
    """Our own directory of each version 1 controller that we may write to."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            directory = MOUNT / name / path.lstrip("/")
            if name in ("memory", "pids", "cpu") and os.access(directory, os.W_OK):
                found[name] = directory
    return found


@functools.cache
def _version2() -> Path | None:
    """Our own directory of version 2, where it hands all three controllers on to its children."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            directory = MOUNT / line[3:].lstrip("/")
            handed_on = directory / "cgroup.subtree_control"
            if handed_on.exists() and os.access(directory, os.W_OK):
                controllers = handed_on.read_text().split()
                return directory if {"cpu", "memory", "pids"} <= set(controllers) else None
    return None

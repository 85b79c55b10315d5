"""Running a task's verifier: apart from the agent's sandbox (fresh) or inside it (shared).

Fresh: a new sandbox receives the agent's state (artifacts, else the working directory) and nothing
else; what the agent replaced, started or planted elsewhere takes no part. Shared, as
Terminal-Bench expects: the agent's own sandbox after its processes are killed and /tests and
/logs/verifier wiped; programs that the agent replaced still count, so changes are flagged.
In both, [[verifier.collect]] commands run before, in the agent's sandbox: they are how a verifier
learns what the agent's programs do without running them where it decides.
Not covered: a test that itself runs the agent's code beside the verdict.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import posixpath
import shlex
import tarfile
import tempfile
from pathlib import Path

from sandbox import archives, reports
from sandbox.base import (
    Archive,
    Backend,
    ExecResult,
    RefusedError,
    Sandbox,
    SandboxBrokenError,
    TooLargeError,
    UnsafeArchiveError,
)
from sandbox.environment import environment_of, limits_of
from sandbox.reports import Report, Source
from sandbox.task import Task, expand

LOGS = "/logs/verifier"
RUN = f"chmod +x /tests/test.sh; /tests/test.sh > {LOGS}/test-stdout.txt 2>&1"
WIPE = f"rm -rf /tests {LOGS}; mkdir -p /tests {LOGS} && chmod 777 {LOGS}"
# Shared only: where a verifier's programs come from, compared from outside before and after.
TOOLCHAIN = (
    *("/bin/bash", "/bin/sh", "/usr/bin/env", "/usr/bin/python3", "/usr/bin/curl"),
    *("/usr/local/bin", "/usr/local/sbin", "/root/.local/bin"),
    *("/etc/profile", "/etc/environment", "/root/.bashrc", "/root/.profile"),
)
# Places that no work has a reason to change: a change there counts as failed.
UNTOUCHABLE = ("/opt/verifier", "/etc/ld.so.preload")
MAX_TOOLCHAIN_BYTES = 256 * 2**20
MAX_LOGS_BYTES = 128 * 2**20
FORBIDDEN_STATE = (
    *("/tests", "/logs", "/opt/verifier", "/usr", "/etc/ld.so.preload", "/proc", "/sys", "/dev"),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64"),
)
READ_ONLY = {"local": ("/etc", "/opt")}  # by back end: where nothing can be copied to besides


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What is left of the agent: an archive for each path, or why there is none."""

    archives: tuple[tuple[str, Archive], ...] = ()
    problems: tuple[str, ...] = ()

    def close(self) -> None:
        for _, archive in self.archives:
            archive.close()


NO_STATE = State()


class VerifierTimeoutError(Exception):
    """The verifier did not end in its time."""


async def collect(task: Task, box: Sandbox) -> tuple[str, ...]:
    """Ends the agent's processes and runs the task's collect commands; what went wrong."""
    await box.end_processes()
    problems = []
    for item in task.config.verifier.collect:
        done = await box.exec_once(
            item.command,
            timeout_s=item.timeout_sec,
            user="" if item.user is None else str(item.user),
        )
        if done.timed_out:
            problems.append(f"a collect command ran out of its {item.timeout_sec:g} s")
    if task.config.verifier.collect:
        await box.end_processes()
    return tuple(problems)


async def save_state(task: Task, box: Sandbox, workdir: str) -> State:
    """Copies what a fresh verifier is to see; what cannot be copied is a problem of the agent's."""
    archives: list[tuple[str, Archive]] = []
    problems = []
    limit = limits_of(task).storage_mb * 2**20
    for path in state_paths(task, workdir):
        try:
            archive = await box.read_archive(path, max_bytes=limit)
        except FileNotFoundError:
            problems.append(f"{path} is gone")
        except TooLargeError as error:
            problems.append(f"{path} was not kept: {error}")
        else:
            if _is_link(archive):
                archive.close()
                problems.append(f"{path} is a link, which is not followed")
            else:
                archives.append((path, archive))
    return State(archives=tuple(archives), problems=tuple(problems))


def state_paths(task: Task, workdir: str, backend: str = "") -> tuple[str, ...]:
    """The task's artifacts, else the working directory.

    Raises:
      RefusedError: one of them would bring what the verifier has to trust, or cannot be copied.
    """
    paths = tuple(_plain(item.source) for item in task.artifacts) or (workdir,)
    for path in paths:
        places = (*FORBIDDEN_STATE, *READ_ONLY.get(backend, ()))
        if any(_within(path, place) or _within(place, path) for place in places):
            raise RefusedError(
                f"{task.root}: a fresh verifier cannot take over {path}; name the task's artifacts "
                "in task.toml or verify with `shared`"
            )
    return paths


def _plain(path: str) -> str:
    return "/" + posixpath.normpath(path).lstrip("/")


def _within(path: str, place: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{place.rstrip('/')}/")


def _is_link(archive: Archive) -> bool:
    with tarfile.open(fileobj=archive.file, mode="r:*") as tar:
        first = tar.next()
    archive.file.seek(0)
    return first is None or first.issym() or first.islnk()


async def run_fresh(task: Task, backend: Backend, state: State, logs: Path) -> Report:
    """The report of a new sandbox that holds the agent's state; NO_STATE is nobody's work."""
    environment = environment_of(task, backend.name)
    paths = [path for path, _ in state.archives]
    if environment.workdir in paths and not environment.setup:
        environment = dataclasses.replace(environment, files=None)  # the state replaces them
    async with backend.sandbox(environment) as box:
        await _wipe(box, *paths)
        for path, archive in state.archives:
            archive.file.seek(0)
            await box.write_archive(archive, str(Path(path).parent))
        return await _run(task, box, logs)


async def run_shared(task: Task, box: Sandbox, logs: Path) -> Report:
    """The report of the agent's own sandbox, after what it left is killed and wiped."""
    await box.end_processes()
    await _wipe(box)
    return await _run(task, box, logs)


async def _wipe(box: Sandbox, *paths: str) -> None:
    """Empties what the verifier writes, and `paths`; a path that is a mount stays, emptied."""
    clear = [f"find {shlex.quote(path)} -delete 2> /dev/null" for path in paths]
    wiped = await box.exec_once("; ".join([*clear, WIPE]), timeout_s=60, user="root")
    if wiped.exit_code != 0:
        raise SandboxBrokenError(f"{LOGS} could not be made anew: {wiped.output[-200:]}")


async def _run(task: Task, box: Sandbox, logs: Path) -> Report:
    """Copies the tests to /tests (empty), runs them, ends what they left, and reads the logs.

    The copy belongs to root.
    """
    config = task.config.verifier
    with contextlib.closing(await asyncio.to_thread(archives.pack, task.tests, "tests")) as tests:
        await box.write_archive(tests, "/")
    done: ExecResult = await box.exec_once(
        RUN,
        timeout_s=config.timeout_sec,
        user="root" if config.user is None else str(config.user),
        env=expand(config.env, os.environ, f"{task.root}/task.toml: verifier.env"),
    )
    await box.end_processes()
    if done.timed_out:
        raise VerifierTimeoutError(f"no end after {config.timeout_sec:g} s")
    try:
        await box.download(LOGS, logs, max_bytes=MAX_LOGS_BYTES)
    except (FileNotFoundError, TooLargeError, UnsafeArchiveError) as error:
        return unusable(f"{LOGS}: {error}")
    if logs.is_symlink() or not logs.is_dir():
        return unusable(f"{LOGS} is no directory any more")
    return reports.read(logs)


def unusable(problem: str) -> Report:
    return Report(source=Source.nothing, assertions={}, rewards={}, problems=(problem,))


async def fingerprint(box: Sandbox) -> dict[str, str]:
    """A digest of each place of the toolchain, read from outside the sandbox."""
    found = {}
    for path in (*TOOLCHAIN, *UNTOUCHABLE):
        try:
            archive = await box.read_archive(path, max_bytes=MAX_TOOLCHAIN_BYTES)
        except (FileNotFoundError, TooLargeError) as error:
            found[path] = type(error).__name__
            continue
        with contextlib.closing(archive):
            found[path] = _digest(archive)
    return found


def _digest(archive: Archive) -> str:
    """Of names, modes, links and content; times are left out, since reading may set them."""
    digest = hashlib.sha256()
    with tarfile.open(fileobj=archive.file, mode="r:*") as tar:
        for member in tar:
            digest.update(f"{member.name} {member.mode:o} {member.linkname}\0".encode())
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                digest.update(content.read())
    return digest.hexdigest()


async def run_control(task: Task, backend: Backend) -> Report:
    """The report of a verifier that saw nobody's work: whether the verifier itself can report."""
    with tempfile.TemporaryDirectory(prefix="t1jax-control-") as folder:
        return await run_fresh(task, backend, NO_STATE, Path(folder) / "logs")

"""The local back end: bubblewrap, with nothing of the host inside but its read-only /usr.

Each sandbox has its own user, process, network, IPC, UTS and mount namespaces, no capability, and
no way to make further user namespaces. All it can write is one size-limited tmpfs, so that nothing
is left on the host, not even after SIGKILL: process 1 ends with the runner, and all else with it.
Run by root, each sandbox is a host user of its own that owns nothing.

Not covered: kernel bugs; timing and load as side channels; memory as a whole where no control group
can be made (then per process). network "public" is the host's own network, its loopback included.
"""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sandbox import cgroups
from sandbox.archives import spool
from sandbox.base import (
    PATH,
    TRANSFER_TIMEOUT_S,
    Archive,
    Environment,
    InfraError,
    Network,
    RefusedError,
    SandboxBrokenError,
    TooLargeError,
)
from sandbox.box import Box, first_command
from sandbox.channel import CHUNK_BYTES, Capture
from sandbox.toolchain import ETC_DIRECTORIES, ETC_FILES, toolchain
from t1jax.errors import UserError

WORKDIR = "/app"
SHM_BYTES = 64 << 20
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
MAX_PROBLEM_BYTES = 1 << 14  # of what tar says: an agent can make it say any amount
NS_GET_USERNS = 0xB701  # ioctl_ns(2)
FIRST_UID, UIDS = 1 << 30, 1 << 30  # host users for sandboxes that root starts; no others are there
ENV = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8"}


class LocalBackend:
    """Sandboxes of this machine, for environments that are declared local."""

    name = "local"

    def __init__(self, *, run_id: str = ""):
        missing = [tool for tool in ("bwrap", "nsenter", "tar") if shutil.which(tool) is None]
        if missing:
            raise UserError(
                f"local sandboxes need {', '.join(missing)}; "
                "install bubblewrap, util-linux and tar, or use the docker back end"
            )
        self._run_id = run_id or secrets.token_hex(4)

    def refusal(self, environment: Environment) -> str:
        if not environment.local:
            return "needs an image, which the local back end does not run: use docker"
        if environment.network is Network.ALLOWLIST:
            return "needs network_mode = allowlist, not supported"
        if environment.user not in ("", "root"):
            return f"needs the user {environment.user!r}; local sandboxes have only root"
        return ""

    async def prepare(self, environment: Environment) -> None:
        if reason := self.refusal(environment):
            raise RefusedError(f"{environment.name}: {reason}")
        await asyncio.to_thread(toolchain)

    def sandbox(self, environment: Environment) -> Box:
        if reason := self.refusal(environment):
            raise RefusedError(f"{environment.name}: {reason}")
        machine = LocalMachine(environment, f"{self._run_id}-{secrets.token_hex(4)}")
        return Box(machine, environment, workdir=environment.workdir or WORKDIR)

    async def close(self) -> None:
        """Nothing is held between sandboxes."""


class PipeStream:
    """Standard input and output of the first process."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    async def read(self) -> bytes:
        return await self._stdout.read(CHUNK_BYTES)

    async def write(self, request: bytes) -> None:
        self._stdin.write(request)
        await self._stdin.drain()

    async def close(self) -> None:
        self._stdin.close()


class LocalMachine:
    """One bubblewrap process and what it takes to look inside."""

    def __init__(self, environment: Environment, name: str):
        self.name = name
        self.default_user = ""
        self._environment = environment
        self._uid = FIRST_UID + secrets.randbelow(UIDS) if os.geteuid() == 0 else os.geteuid()
        self._process: asyncio.subprocess.Process | None = None
        self._group: cgroups.Group | None = None
        self._first_pid = 0

    async def start(self) -> PipeStream:
        tools = await asyncio.to_thread(toolchain)
        self._group = cgroups.make_group(self.name, self._environment.limits)
        reader, writer = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._as_owner(),
                *self._bwrap(tools, writer),
                *first_command(self._rlimits()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(writer,),
                env=dict(ENV),
                limit=CHUNK_BYTES,
            )
        finally:
            os.close(writer)
            if self._process is None:
                os.close(reader)
        self._first_pid = await self._read_first_pid(reader)
        if self._group is not None:
            self._group.add(self._first_pid)
        return PipeStream(self._process)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)
        if self._group is not None:
            self._group.remove()
            self._group = None

    async def why_ended(self) -> InfraError | SandboxBrokenError:
        return InfraError(f"sandbox {self.name}: its first process was ended from outside")

    async def read_archive(self, src: str, *, max_bytes: int) -> Archive:
        path = PurePosixPath(src)
        words = ["--create", "--file=-", f"--directory={path.parent}", "--", path.name or "."]
        file = spool()
        try:
            await self._pack_into(file, src, words, max_bytes)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return Archive(file)

    async def _pack_into(
        self, file: IO[bytes], src: str, words: list[str], max_bytes: int
    ) -> None:
        async with self._tar(words) as (tar, told):
            assert tar.stdout is not None
            while chunk := await tar.stdout.read(CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > max_bytes:
                    raise TooLargeError(f"{src} in {self.name} is larger than {max_bytes} bytes")
            problem = await told
            if await tar.wait() != 0:
                if "Cannot stat: No such file" in problem or "Cannot open: No such" in problem:
                    raise FileNotFoundError(f"no {src} in sandbox {self.name}")
                raise SandboxBrokenError(f"{self.name}: reading {src}: {problem[-300:]}")

    async def write_archive(self, archive: Archive, parent: str) -> None:
        words = ["--extract", "--file=-", "--no-same-owner", "--preserve-permissions"]
        async with self._tar([*words, f"--directory={parent}"]) as (tar, told):
            assert tar.stdin is not None
            archive.file.seek(0)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # tar says why
                while chunk := archive.file.read(CHUNK_BYTES):
                    tar.stdin.write(chunk)
                    await tar.stdin.drain()
            tar.stdin.close()
            problem = await told
            if await tar.wait() != 0:
                raise SandboxBrokenError(f"{self.name}: writing below {parent}: {problem[-300:]}")

    @contextlib.asynccontextmanager
    async def _tar(
        self, words: list[str]
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, "asyncio.Task[str]"]]:
        """The system's tar, which sees the sandbox's files and is not seen from inside.

        What it says is read all the while, so that it never waits for us; beside it, until then.
        """
        if self._process is None:
            raise RuntimeError(f"sandbox {self.name} is not started, or stopped")
        with _namespaces(self._first_pid) as (user, mount):
            enter = ["nsenter", f"--user=/proc/self/fd/{user}", f"--mount=/proc/self/fd/{mount}"]
            tar = await asyncio.create_subprocess_exec(
                *self._as_owner(),
                *enter,
                "--preserve-credentials",
                "--",
                "/usr/bin/tar",
                *words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(user, mount),
                env={"PATH": PATH, "LC_ALL": "C"},
            )
        told = asyncio.create_task(_told(tar))
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S):
                yield tar, told
        except TimeoutError:
            raise SandboxBrokenError(
                f"{self.name}: no copy within {TRANSFER_TIMEOUT_S:g} s: tar {shlex.join(words)}"
            ) from None
        finally:
            told.cancel()
            if tar.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    tar.kill()
            await asyncio.wait({told})
            await _kill(tar, tar.pid)

    def _as_owner(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups", "--"]

    def _bwrap(self, tools: Path, info_fd: int) -> list[str]:
        """The command line up to the first process; see bwrap(1)."""
        storage_bytes = self._environment.limits.storage_mb << 20
        names = ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        return [
            *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--new-session"),
            *("--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"),
            *("--uid", "0", "--gid", "0", "--info-fd", str(info_fd)),
            *("--size", str(storage_bytes), "--tmpfs", "/", *_system()),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--perms", "1777", "--dir", "/tmp", "--dir", "/run"),
            *("--perms", "1777", "--dir", "/var/tmp", "--dir", "/root", "--chdir", "/"),
            *("--ro-bind", str(tools / "opt"), "/opt", *_etc(tools)),
            *(["--share-net", *names] if self._environment.network is Network.PUBLIC else []),
        ]

    def _rlimits(self) -> str:
        limits = self._environment.limits
        memory = "" if self._group is not None else f"; ulimit -v {limits.memory_mb << 10}"
        return f"ulimit -c 0; ulimit -u {limits.pids}{memory}"

    async def _read_first_pid(self, reader: int) -> int:
        """The host's number for process 1, which bwrap writes once the namespaces are there."""
        with open(reader, "rb") as info:
            told = await asyncio.to_thread(info.read)
        if told:
            return int(json.loads(told)["child-pid"])
        assert self._process is not None and self._process.stderr is not None
        problem = (await self._process.stderr.read()).decode(errors="replace").strip()
        raise InfraError(f"bubblewrap cannot start a sandbox: {problem}; see docs/sandbox.md")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kills process 1; the kernel then kills the rest, and bwrap ends after the last."""
        await _kill(process, self._first_pid or process.pid)


@contextlib.contextmanager
def _namespaces(pid: int) -> Iterator[tuple[int, int]]:
    """Of a process: the mount namespace, and before it the user namespace that owns it.

    That is not the process's own user namespace, since --disable-userns nests another one.
    """
    mount = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        user = fcntl.ioctl(mount, NS_GET_USERNS)
        try:
            yield user, mount
        finally:
            os.close(user)
    finally:
        os.close(mount)


async def _told(tar: asyncio.subprocess.Process) -> str:
    """The beginning and the end of what it says, read until it says no more."""
    assert tar.stderr is not None
    capture = Capture(MAX_PROBLEM_BYTES)
    while chunk := await tar.stderr.read(CHUNK_BYTES):
        capture.add(chunk)
    return capture.text().strip()


async def _kill(process: asyncio.subprocess.Process, pid: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(CHUNK_BYTES):
                    pass
            await process.wait()
    except TimeoutError:
        raise InfraError(f"process {pid} is still there {STOP_TIMEOUT_S} s after SIGKILL") from None


@functools.cache
def _system() -> list[str]:
    """/usr, and what lies beside it: mounts, not links, which an agent could replace."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_dir():
            words += ["--ro-bind", str(path.resolve()), str(path)]
    return words


def _etc(tools: Path) -> list[str]:
    """Generated files for users and hosts; of the host's own only what programs link against."""
    words = ["--ro-bind", str(tools / "etc"), "/etc"]
    for name in (*ETC_DIRECTORIES, *ETC_FILES):
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return words

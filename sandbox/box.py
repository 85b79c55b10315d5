"""The sandbox that all back ends share: sessions, time limits and files over one machine.

A back end supplies the Machine: how it starts, ends, and moves archives. Everything that a trial
sees of a shell is here, so that it is the same everywhere.
"""

import asyncio
import contextlib
import dataclasses
import importlib.resources
import shlex
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol, Self

from sandbox import archives
from sandbox.base import (
    AGENT_SESSION,
    MAX_ARCHIVE_BYTES,
    MAX_OUTPUT_BYTES,
    TIMEOUT_EXIT_CODE,
    Archive,
    Environment,
    ExecResult,
    InfraError,
    SandboxBrokenError,
)
from sandbox.channel import Answer, Capture, Channel, Stream, StreamEndedError

ANSWER_TIMEOUT_S = 30.0  # for what takes milliseconds on a machine that is not overloaded
# After a command's time: what is sent, and how long the session has to come back (3.6 s in all).
ESCALATION = (
    (("interrupt", "INT"), 0.3),
    (("interrupt", "INT"), 0.5),
    (("interrupt", "KILL"), 0.3),
    (("interrupt", "KILL"), 0.5),
    (("kill",), 2.0),
)
DIRECTORIES = ("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests")
ROOT = ("", "root", "0")
FIRST_PROCESS = 'IFS= LC_ALL=C read -r -N "$0" text; eval "$text"'  # text: warden.bash


def script(name: str) -> str:
    """The text of a file of this package."""
    return (importlib.resources.files("sandbox") / name).read_text()


WARDEN = script("warden.bash")
SESSION = script("session.bash")


def first_command(prelude: str = ":") -> list[str]:
    """What process 1 of a sandbox is: bash, which runs `prelude` and then reads the warden."""
    start = f"{prelude}; {FIRST_PROCESS}"
    return ["bash", "--norc", "--noprofile", "-c", start, str(len(WARDEN.encode()))]



class Machine(Protocol):
    """What a back end knows of one sandbox."""

    name: str
    default_user: str  # of its image, known once started; empty means root

    async def start(self) -> Stream:
        """Starts it with `first_command` as process 1; the stream is that process's."""

    async def stop(self) -> None:
        """Removes all of it, also after a start that failed half-way."""

    async def why_ended(self) -> InfraError | SandboxBrokenError:
        """Whose fault it is that the stream ended."""

    async def read_archive(self, src: str, *, max_bytes: int) -> Archive: ...

    async def write_archive(self, archive: Archive, parent: str) -> None: ...


@dataclasses.dataclass(kw_only=True)
class Session:
    """A shell as it was when its last command ended."""

    user: str
    env: Mapping[str, str]
    cwd: str
    live: bool = False


class Box:
    """A Sandbox over a Machine."""

    def __init__(self, machine: Machine, environment: Environment, *, workdir: str):
        self.name = machine.name
        self._machine = machine
        self._environment = environment
        self._workdir = workdir
        self._sessions: dict[str, Session] = {}
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._once = 0
        self._running = ""  # the session whose command was asked last

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        stream = await self._machine.start()
        self._channel = Channel(stream)
        with contextlib.suppress(OSError):  # of a process that ended: the next request says why
            await stream.write(WARDEN.encode())
        where = shlex.join([*DIRECTORIES, self._workdir or "."])
        await self._set_up(f"mkdir -p -- {where} && chmod 777 -- {shlex.join(DIRECTORIES[:3])}")
        if self._environment.local and self._environment.files is not None:
            await self._put(self._environment.files, self._workdir)  # nothing is there yet
        if self._environment.local and self._environment.setup:
            in_place = f"cd -- {shlex.quote(self._workdir)}\n{self._environment.setup}"
            await self._set_up(in_place)

    async def stop(self) -> None:
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:  # the caller is cancelled, the removal is not
            await stopping
            raise

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        session: str = AGENT_SESSION,
        user: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        if "\0" in command:
            return ExecResult(output="error: a command cannot hold a NUL character\n", exit_code=2)
        async with self._turn:
            if session in self._sessions:
                self._check_user(session, user)
                command = _alone(command, env, cwd)
            else:
                self._sessions[session] = self._new_session(user, env, cwd)
            return await self._run(session, command, timeout_s, max_output_bytes)

    async def exec_once(
        self,
        command: str,
        *,
        timeout_s: float,
        user: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        if "\0" in command:
            return ExecResult(output="error: a command cannot hold a NUL character\n", exit_code=2)
        async with self._turn:
            self._once += 1
            name = f"once-{self._once}"
            self._sessions[name] = self._new_session(user, env, cwd)
            inner = f"(eval {shlex.quote(command)})"  # so that `exit` ends less than the session
            result = await self._run(name, inner, timeout_s, max_output_bytes)
            if self._sessions.pop(name).live:
                await self._ask("close", name)
            return dataclasses.replace(result, restarted=False)

    async def end_processes(self) -> None:
        async with self._turn:
            answer = await self._ask("end")
            self._sessions.clear()
            if answer.status:
                raise SandboxBrokenError(f"{self.name}: {answer.status} processes survive SIGKILL")
            self._open_channel().forget_output()

    async def upload(self, src: Path, dst: str, *, user: str = "") -> None:
        """Replaces `dst`, which belongs to root unless another user is named."""
        _check_absolute(dst)
        parent = str(PurePosixPath(dst).parent)
        await self._set_up(f"rm -rf -- {shlex.quote(dst)} && mkdir -p -- {shlex.quote(parent)}")
        await self._put(src, dst)
        if user not in ROOT:
            await self._set_up(f"chown -R -- {shlex.quote(user)} {shlex.quote(dst)}")

    async def download(self, src: str, dst: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        archive = await self.read_archive(src, max_bytes=max_bytes)
        with contextlib.closing(archive):
            await asyncio.to_thread(archives.unpack, archive, dst, max_bytes=max_bytes)

    async def read_archive(self, src: str, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> Archive:
        _check_absolute(src)
        return await self._machine.read_archive(src, max_bytes=max_bytes)

    async def write_archive(self, archive: Archive, parent: str) -> None:
        _check_absolute(parent)
        await self._machine.write_archive(archive, parent)

    async def _put(self, src: Path, dst: str) -> None:
        """Copies into a directory that is there, as root's; what `dst` has already stays."""
        _check_absolute(dst)
        path = PurePosixPath(dst)
        archive = await asyncio.to_thread(archives.pack, src, path.name)
        with contextlib.closing(archive):
            await self._machine.write_archive(archive, str(path.parent))

    async def _set_up(self, command: str, *, cwd: str = "/") -> None:
        timeout_s = self._environment.build_timeout_s
        done = await self.exec_once(command, timeout_s=timeout_s, user="root", cwd=cwd)
        if done.exit_code != 0:
            raise SandboxBrokenError(
                f"{self.name}: {command[:200]!r} ended with {done.exit_code}: {done.output[-500:]}"
            )

    async def _stop(self) -> None:
        channel, self._channel = self._channel, None
        self._sessions.clear()
        try:
            if channel is not None:
                await channel.close()
        finally:
            await self._machine.stop()

    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise RuntimeError(f"sandbox {self.name} is not started, or stopped")
        return self._channel

    def _new_session(self, user: str, env: Mapping[str, str] | None, cwd: str) -> Session:
        return Session(
            user=user or self._environment.user or self._machine.default_user,
            env={**self._environment.env, **(env or {})},
            cwd=cwd or self._workdir,
        )

    def _check_user(self, session: str, user: str) -> None:
        has = self._sessions[session].user
        if user and user != has:
            raise ValueError(f"session {session!r} is of user {has or 'the image'!r}, not {user!r}")

    async def _run(
        self, name: str, command: str, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        begin = time.monotonic()
        session = self._sessions[name]
        capture = Capture(max_output_bytes)
        try:
            async with asyncio.timeout(timeout_s + ANSWER_TIMEOUT_S):
                answer, timed_out = await self._command(name, command, timeout_s, capture)
        except TimeoutError:
            raise SandboxBrokenError(f"{self.name} does not answer any more") from None
        if answer.kind == "done":
            session.cwd = answer.rest
        return ExecResult(
            output=capture.text(),
            exit_code=TIMEOUT_EXIT_CODE if timed_out else answer.status,
            timed_out=timed_out,
            truncated=capture.truncated,
            restarted=answer.kind != "done",
            seconds=time.monotonic() - begin,
        )

    async def _command(
        self, name: str, command: str, timeout_s: float, capture: Capture
    ) -> tuple[Answer, bool]:
        """Runs it in the session's shell, which is started first where there is none."""
        session = self._sessions[name]
        if not session.live:
            await self._begin_session(name)
        payload = command.encode("utf-8", "surrogateescape")
        words = ("run", name, str(len(payload)))
        channel = await self._ready_channel()
        self._running = name
        answer, timed_out = await self._wait(
            await channel.ask(*words, payload=payload, capture=capture), name, timeout_s
        )
        if answer.kind == "absent":  # its shell was killed after its last command
            await self._begin_session(name)
            again = await channel.ask(*words, payload=payload, capture=capture)
            answer, timed_out = await self._wait(again, name, timeout_s)
        await self._ended(name, answer)
        return answer, timed_out

    async def _wait(
        self, answer: "asyncio.Future[Answer]", name: str, timeout_s: float
    ) -> tuple[Answer, bool]:
        """The answer, and whether the time ran out before it; then the command is ended."""
        await self._watch(answer, timeout_s)
        if answer.done():
            return await self._result(answer), False
        for (verb, *signal), grace_s in ESCALATION:
            await self._open_channel().tell(verb, name, *signal)
            await self._watch(answer, grace_s)
            if answer.done():
                return await self._result(answer), True
        raise SandboxBrokenError(f"{self.name}: the shell of {name!r} survives SIGKILL")

    async def _watch(self, answer: "asyncio.Future[Answer]", timeout_s: float) -> None:
        await asyncio.wait({answer}, timeout=timeout_s)

    async def _result(self, answer: "asyncio.Future[Answer]") -> Answer:
        try:
            return await asyncio.shield(answer)
        except StreamEndedError as end:
            raise await self._machine.why_ended() from end

    async def _begin_session(self, name: str) -> None:
        session = self._sessions[name]
        exports = [f"export {key}={shlex.quote(value)}" for key, value in session.env.items()]
        here = f"cd -- {shlex.quote(session.cwd)} 2>/dev/null || cd /" if session.cwd else ""
        payload = SESSION.replace("# SETUP", "\n".join([*exports, here])).encode(
            "utf-8", "surrogateescape"
        )
        user = [] if session.user in ROOT else [session.user]
        await self._ask("open", name, str(len(payload)), *user, payload=payload)
        session.live = True

    async def _ask(self, verb: str, *words: str, payload: bytes = b"") -> Answer:
        """What the first process answers at once."""
        channel = await self._ready_channel()
        answer = await channel.ask(verb, *words, payload=payload)
        await self._watch(answer, ANSWER_TIMEOUT_S)
        if not answer.done():
            raise SandboxBrokenError(f"{self.name} does not answer any more")
        return await self._result(answer)

    async def _ready_channel(self) -> Channel:
        """The channel, once a command whose caller was cancelled has been killed."""
        channel = self._open_channel()
        if (pending := channel.pending) is not None:
            answer, _ = await self._wait(pending, self._running, 0)
            await self._ended(self._running, answer)
            channel.forget_output()
        return channel

    async def _ended(self, name: str, answer: Answer) -> None:
        """Notes whether the session's shell is still there, and lets the first process know."""
        if answer.kind == "done":
            await self._open_channel().tell("done", name)
        elif name in self._sessions:
            self._sessions[name].live = False


def _alone(command: str, env: Mapping[str, str] | None, cwd: str) -> str:
    """The command in a subshell with its own variables and directory, where there are any."""
    if not env and not cwd:
        return command
    exports = [f"export {key}={shlex.quote(value)}" for key, value in (env or {}).items()]
    there = [f"cd -- {shlex.quote(cwd)}"] if cwd else []
    return "(\n" + "\n".join([*exports, *there, f"eval {shlex.quote(command)}"]) + "\n)"


def _check_absolute(path: str) -> None:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path {path!r} in a sandbox; expected an absolute one without '..'")

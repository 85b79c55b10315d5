"""Any environment of Harbor (Daytona, Modal, E2B, GKE, Podman …) as a sandbox of ours.

Harbor runs each command in a process of its own, so a session here is a file inside the sandbox
that carries directory and exported variables from command to command. Not covered: functions,
aliases and `jobs` of a session; processes that the environment hides from `end_processes`.
Needs the extra `harbor` (Python 3.12 or later) only to make environments: `HarborBackend`.
"""

import asyncio
import contextlib
import importlib.util
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Protocol, Self

from sandbox import archives
from sandbox.base import (
    AGENT_SESSION,
    MAX_ARCHIVE_BYTES,
    MAX_OUTPUT_BYTES,
    TIMEOUT_EXIT_CODE,
    TRANSFER_TIMEOUT_S,
    Archive,
    Environment,
    ExecResult,
    InfraError,
    Network,
    RefusedError,
    TooLargeError,
)
from sandbox.channel import Capture
from t1jax.errors import UserError

STATE = "/tmp/.t1jax-session"
GRACE_S = 10.0  # of Harbor's own time limit over the one inside
# Kills all but process 1 and those that run this very command.
END = r"""
keep=" 1 " p=$$
while [ "$p" -gt 1 ]; do keep="$keep$p "; read -r _ _ _ p _ </proc/$p/stat; done
for try in 1 2 3; do
    for p in /proc/[0-9]*; do
        p=${p#/proc/}
        case $keep in *" $p "*) ;; *) kill -KILL "$p" ;; esac
    done
done 2>/dev/null
true"""


class Done(Protocol):
    """Harbor's ExecResult."""

    stdout: str | None
    stderr: str | None
    return_code: int


class HarborEnvironment(Protocol):
    """The part of Harbor's BaseEnvironment that is used here."""

    async def start(self, force_build: bool) -> None: ...
    async def stop(self, delete: bool) -> None: ...
    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...
    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Done: ...


class HarborBox:
    """A Sandbox over one of Harbor's environments."""

    def __init__(self, inner: HarborEnvironment, environment: Environment, name: str):
        self.name = name
        self._inner = inner
        self._environment = environment
        self._turn = asyncio.Lock()

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
        await self._call("start", self._inner.start(force_build=False))
        await self._checked(f"mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests {STATE}")

    async def stop(self) -> None:
        await self._call("stop", self._inner.stop(delete=True))

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
        state = f"{STATE}/{session}"
        keep = f"{{ export -p; printf 'cd -- %q\\n' \"$PWD\"; }} >{state}"
        whole = f"[ ! -e {state} ] || . {state}; trap {shlex.quote(keep)} EXIT\n{command}"
        async with self._turn:
            return await self._run(whole, timeout_s, user, env, cwd, max_output_bytes)

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
        async with self._turn:
            return await self._run(command, timeout_s, user, env, cwd, max_output_bytes)

    async def end_processes(self) -> None:
        await self._checked(END)
        await self._checked(f"rm -rf {STATE} && mkdir -p {STATE}")

    async def upload(self, src: Path, dst: str, *, user: str = "") -> None:
        path = PurePosixPath(dst)
        parent = shlex.quote(str(path.parent))
        await self._checked(f"rm -rf -- {shlex.quote(dst)} && mkdir -p -- {parent}")
        with contextlib.closing(await asyncio.to_thread(archives.pack, src, path.name)) as archive:
            await self.write_archive(archive, str(path.parent))
        if user:
            await self._checked(f"chown -R -- {shlex.quote(user)} {shlex.quote(dst)}")

    async def download(self, src: str, dst: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        with contextlib.closing(await self.read_archive(src, max_bytes=max_bytes)) as archive:
            await asyncio.to_thread(archives.unpack, archive, dst, max_bytes=max_bytes)

    async def read_archive(self, src: str, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> Archive:
        path, packed = PurePosixPath(src), f"/tmp/.t1jax-{secrets.token_hex(8)}.tar"
        there = await self.exec_once(f"test -e {shlex.quote(src)}", timeout_s=60)
        if there.exit_code != 0:
            raise FileNotFoundError(f"no {src} in sandbox {self.name}")
        words = ["tar", "-C", str(path.parent), "-cf", packed, "--", path.name]
        size = await self._checked(f"{shlex.join(words)} && stat -c %s {packed}")
        try:
            if int(size.split()[-1]) > max_bytes:
                raise TooLargeError(f"{src} in {self.name} is larger than {max_bytes} bytes")
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / "archive.tar"
                await self._call("download", _timed(self._inner.download_file(packed, local)))
                file = archives.spool()
                with open(local, "rb") as content:
                    shutil.copyfileobj(content, file)
        finally:
            await self._checked(f"rm -f {packed}")
        file.seek(0)
        return Archive(file)

    async def write_archive(self, archive: Archive, parent: str) -> None:
        packed = f"/tmp/.t1jax-{secrets.token_hex(8)}.tar"
        archive.file.seek(0)
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "archive.tar"
            with open(local, "wb") as content:
                shutil.copyfileobj(archive.file, content)
            await self._call("upload", _timed(self._inner.upload_file(local, packed)))
        await self._checked(f"tar -C {shlex.quote(parent)} -xpf {packed} && rm -f {packed}")

    async def _run(
        self,
        command: str,
        timeout_s: float,
        user: str,
        env: Mapping[str, str] | None,
        cwd: str,
        max_output_bytes: int,
    ) -> ExecResult:
        begin = time.monotonic()
        inner = f"exec 2>&1 </dev/null; timeout -k 2 {timeout_s:g} bash -c {shlex.quote(command)}"
        running = self._inner.exec(
            inner,
            cwd=cwd or self._environment.workdir or None,
            env={**self._environment.env, **(env or {})},
            timeout_sec=int(timeout_s + GRACE_S),
            user=user or self._environment.user or None,
        )
        done = await self._call("exec", running)
        capture = Capture(max_output_bytes)
        capture.add((done.stdout or "").encode("utf-8", "surrogateescape"))
        seconds = time.monotonic() - begin
        timed_out = done.return_code in (TIMEOUT_EXIT_CODE, 137) and seconds >= timeout_s
        return ExecResult(
            output=capture.text(),
            exit_code=TIMEOUT_EXIT_CODE if timed_out else done.return_code,
            timed_out=timed_out,
            truncated=capture.truncated,
            seconds=seconds,
        )

    async def _checked(self, command: str) -> str:
        done = await self.exec_once(command, timeout_s=120, user="root", cwd="/")
        if done.exit_code != 0:
            raise InfraError(f"{self.name}: {command[:100]!r} failed: {done.output[-300:]}")
        return done.output

    async def _call(self, what: str, awaited: Any) -> Any:
        try:
            return await awaited
        except (UserError, asyncio.CancelledError):
            raise
        except Exception as error:  # each of Harbor's services raises its own
            raise InfraError(f"{self.name}: {what}: {type(error).__name__}: {error}") from error


async def _timed(transfer: Awaitable[None]) -> None:
    async with asyncio.timeout(TRANSFER_TIMEOUT_S):
        await transfer


class HarborBackend:
    """Makes sandboxes with Harbor's factory: `kind` is one of its environment types."""

    def __init__(self, kind: str, *, run_id: str = ""):
        if importlib.util.find_spec("harbor") is None:
            raise UserError(
                "harbor is not installed; run: pip install 't1jax[harbor]' (Python 3.12 or later)"
            )
        self.name = f"harbor:{kind}"
        self._kind = kind
        self._run_id = run_id or secrets.token_hex(4)
        self._folder = Path(tempfile.mkdtemp(prefix="t1jax-harbor-"))

    def refusal(self, environment: Environment) -> str:
        if environment.context is None:
            return "has no environment directory, which Harbor starts from"
        return ""

    async def prepare(self, environment: Environment) -> None:
        """Harbor builds when it starts."""
        if reason := self.refusal(environment):
            raise RefusedError(f"{environment.name}: {reason}")

    def sandbox(self, environment: Environment) -> HarborBox:
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.environment_type import EnvironmentType
        from harbor.models.task.config import EnvironmentConfig
        from harbor.models.trial.paths import TrialPaths

        name = f"{self._run_id}-{secrets.token_hex(4)}"
        paths = TrialPaths(trial_dir=self._folder / name)
        paths.mkdir()
        limits = environment.limits
        config = EnvironmentConfig(
            docker_image=environment.image or None, cpus=limits.cpus, memory_mb=limits.memory_mb,
            storage_mb=limits.storage_mb, build_timeout_sec=environment.build_timeout_s,
            network_mode="public" if environment.network is Network.PUBLIC else "no-network",
        )  # fmt: skip
        inner = EnvironmentFactory.create_environment(
            type=EnvironmentType(self._kind), environment_dir=environment.context,
            environment_name=environment.name.replace("/", "-"), session_id=name,
            trial_paths=paths, task_env_config=config,
        )  # fmt: skip
        return HarborBox(inner, environment, name)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

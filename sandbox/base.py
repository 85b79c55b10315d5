"""What a sandbox is: the interface of every back end, what it is made from, what it returns.

Owns the contract and knows no back end. A trial reads:

    backend = make_backend("local")
    await backend.prepare(environment)                  # image build or pull; nothing on local
    async with backend.sandbox(environment) as box:     # started here, removed whatever happens
        done = await box.exec("make test", timeout_s=60)
        await box.end_processes()                       # nothing of the agent runs on
        await box.upload(tests, "/tests")
        done = await box.exec("bash /tests/test.sh", timeout_s=600, session="verifier", user="root")

Commands of one `session` share one shell, as in a terminal: its directory, variables and
background jobs last. A session that does not exist is started with a clean environment, in the
working directory.
"""

import dataclasses
import enum
import io
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from t1jax.errors import UserError

BASE_IMAGE = "t1jax/base:1"  # made by `make image`; what the shipped tasks' Dockerfiles start from
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of every new session
# Python with pytest and pytest-json-ctrf in every local sandbox (read-only) and in BASE_IMAGE.
VERIFIER_PYTHON = "/opt/verifier/bin/python3"
AGENT_SESSION = "agent"
TIMEOUT_EXIT_CODE = 124  # as of timeout(1)
MAX_OUTPUT_BYTES = 1 << 20  # of one command: the first and the last half are kept
MAX_ARCHIVE_BYTES = 1 << 30
TRANSFER_TIMEOUT_S = 300.0  # of one archive, in or out


class InfraError(UserError):
    """The engine or the machine failed, not the agent: never a reward of 0, retried once."""


class SandboxBrokenError(UserError):
    """What ran inside made the sandbox unusable; the agent's doing, so no reason for a retry."""


class RefusedError(UserError):
    """This back end cannot run this environment; the message names what is not supported."""


class BuildError(UserError):
    """The image's own definition does not build; the message ends with the build's last lines."""


class UnsafeArchiveError(UserError):
    """A download holds what must not or cannot be written here; nothing of it was kept."""


class TooLargeError(UserError):
    """A download is larger than the caller allows; nothing of it was kept."""


class Network(enum.StrEnum):
    """What a sandbox reaches: everything, or no host at all."""

    PUBLIC = "public"
    NONE = "no-network"
    ALLOWLIST = "allowlist"  # part of the format; every back end here refuses it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one sandbox may use, all its processes together."""

    memory_mb: int = 2048
    cpus: float = 1.0
    pids: int = 512
    storage_mb: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            amount = getattr(self, field.name)
            if not (amount > 0 and math.isfinite(amount)):
                raise UserError(f"limits.{field.name} = {amount}; expected a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What a sandbox is made from; each back end reads its own part of it.

    docker: `image` where given, else the Dockerfile in `context`. local: the files of `files`
    copied into `workdir`, then `setup` run there once by bash, as root, before anything else.
    """

    name: str
    image: str = ""
    context: Path | None = None
    local: bool = False  # declared to run on the local back end
    files: Path | None = None
    setup: str = ""
    workdir: str = ""  # docker: empty means the image's own; local: empty means /app
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user: str = ""  # of commands that name none; empty means the image's own
    network: Network = Network.PUBLIC
    limits: Limits = Limits()
    build_timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What one command did. `output` is stdout and stderr as a terminal would show them.

    Bytes that are no UTF-8 arrive as U+FFFD. `truncated`: the middle is missing, and one line in
    its place says how much. `restarted`: the session's shell ended (exit, exec, set -e, or a
    command that only SIGKILL of the shell stopped); the next command has a new one, in the same
    directory, with the variables that the session began with.
    """

    output: str
    exit_code: int  # TIMEOUT_EXIT_CODE where it timed out
    timed_out: bool = False
    truncated: bool = False
    restarted: bool = False
    seconds: float = 0.0


class Archive:
    """A tar stream on its way from one place to another, on disk where it is large."""

    def __init__(self, file: IO[bytes]):
        self.file = file

    @classmethod
    def of_bytes(cls, content: bytes) -> Self:
        return cls(io.BytesIO(content))

    def close(self) -> None:
        self.file.close()


class Sandbox(Protocol):
    """One sandbox; `start` once, then anything, then `stop`, which is safe to call at any time.

    Calls from several tasks are taken in turn. Every method may raise InfraError and, after
    start, SandboxBrokenError; cancelling any of them leaves nothing running that `stop` misses.
    """

    name: str

    async def start(self) -> None:
        """Makes and starts it, directories /logs/agent, /logs/verifier and /tests included."""

    async def stop(self) -> None:
        """Ends every process and removes all of it; nothing to do is no error."""

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
        """Runs a bash command in a session.

        `user`, `env` and `cwd` are those of a new session; for one that exists, `env` and `cwd`
        hold for this command alone and another user is an error. After `timeout_s` it is
        interrupted, then killed, together with what it started.
        """

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
        """Runs a bash command in a new shell with a clean environment, which ends with it."""

    async def end_processes(self) -> None:
        """Kills every process but the sandbox's own first one; all sessions are gone after it."""

    async def upload(self, src: Path, dst: str, *, user: str = "") -> None:
        """Copies a file to the path `dst`, or a directory's content into the directory `dst`.

        What is at `dst` already is removed first, a symlink itself and not what it points at.
        """

    async def download(self, src: str, dst: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        """Copies a file or directory to the new path `dst`; links that lead outside are refused.

        Raises FileNotFoundError where there is no `src`, TooLargeError above `max_bytes`,
        UnsafeArchiveError for links that lead out and names that this file system refuses.
        """

    async def read_archive(self, src: str, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> Archive:
        """A file or directory as tar, its members below its own last name (`app/…`)."""

    async def write_archive(self, archive: Archive, parent: str) -> None:
        """Unpacks an archive, made inside any sandbox, into the directory `parent`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Backend(Protocol):
    """Makes sandboxes of one kind and owns what they share: images, engines, toolchain."""

    name: str

    def refusal(self, environment: Environment) -> str:
        """Why this back end cannot run it; empty where it can."""

    async def prepare(self, environment: Environment) -> None:
        """Builds or pulls what its sandboxes start from, once per content."""

    def sandbox(self, environment: Environment) -> Sandbox:
        """A sandbox that is not started yet; `async with` starts and stops it."""

    async def close(self) -> None:
        """Gives back connections; sandboxes must be stopped by then."""


def make_backend(name: str, *, run_id: str = "", endpoints: str = "") -> Backend:
    """The back end of this name (docker, local, harbor:TYPE), for sandboxes that belong to one run.

    `endpoints`: engines as "URL=CAPACITY,…"; empty means DOCKER_HOST or the local engine.
    """
    if name == "local":
        from sandbox.local import LocalBackend

        return LocalBackend(run_id=run_id)
    if name == "docker":
        from sandbox.docker import DockerBackend

        return DockerBackend(run_id=run_id, endpoints=endpoints)
    kind, _, harbor_type = name.partition(":")
    if kind == "harbor" and harbor_type:
        from sandbox.harbor import HarborBackend

        return HarborBackend(harbor_type, run_id=run_id)
    raise UserError(f"no sandbox back end {name!r}; there are docker, local and harbor:TYPE")

"""The Docker back end: one container per sandbox on any engine, started from the task's image.

Process 1 is our own (warden.bash), attached before it starts. When the connection ends, so does its
standard input, hence the container, which the engine then removes: a runner that is killed leaves
nothing, even without a janitor.

Not covered: an engine or kernel with bugs; a disk quota where the storage driver has none (a
watch ends the processes of a container that has written too much, within seconds).
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import docker.errors
import docker.types

from sandbox.archives import spool
from sandbox.base import (
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
from sandbox.engine import AttachedStream, Engine, Engines, parse_endpoints
from sandbox.images import ensure_image

RUN_LABEL, OWNER_LABEL = "t1jax.run", "t1jax.owner"
# What package managers and servers in tasks need; without the rest of Docker's default.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
                "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT")  # fmt: skip
OPEN_FILES = 16384
WATCH_S = 3.0


def process_identity(pid: int) -> str:
    """Host, boot and start of a process, which no later one can have; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{pid}/{started}"


class DockerBackend:
    """Sandboxes on one or more engines."""

    name = "docker"

    def __init__(self, *, run_id: str = "", endpoints: str = "", build_network: str = "default"):
        self._run_id = run_id or secrets.token_hex(4)
        self._engines = Engines(parse_endpoints(endpoints))
        self._build_network = build_network

    def refusal(self, environment: Environment) -> str:
        if environment.network is Network.ALLOWLIST:
            return "needs network_mode = allowlist, not supported"
        if not environment.image and environment.context is None:
            return "has neither an image nor a Dockerfile"
        return ""

    async def prepare(self, environment: Environment) -> None:
        """On every engine that answers; a later start prepares an engine that did not."""
        self._refuse(environment)
        made = [self.image(engine, environment) for engine in self._engines.all]
        problems = [
            problem
            for problem in await asyncio.gather(*made, return_exceptions=True)
            if isinstance(problem, BaseException)
        ]
        fatal = [problem for problem in problems if not isinstance(problem, InfraError)]
        if fatal or len(problems) == len(made):
            raise [*fatal, *problems][0]

    def sandbox(self, environment: Environment) -> Box:
        self._refuse(environment)
        machine = DockerMachine(self, environment, f"t1jax-{self._run_id}-{secrets.token_hex(4)}")
        return Box(machine, environment, workdir=environment.workdir)

    async def close(self) -> None:
        await asyncio.to_thread(self._engines.close)

    @property
    def engines(self) -> Engines:
        return self._engines

    @property
    def labels(self) -> dict[str, str]:
        """What the janitor goes by."""
        return {RUN_LABEL: self._run_id, OWNER_LABEL: process_identity(os.getpid())}

    async def image(self, engine: Engine, environment: Environment) -> str:
        """The environment's image on this engine."""
        return await ensure_image(engine, environment, build_network=self._build_network)

    def _refuse(self, environment: Environment) -> None:
        if reason := self.refusal(environment):
            raise RefusedError(f"{environment.name}: {reason}")


class DockerMachine:
    """One container."""

    def __init__(self, backend: DockerBackend, environment: Environment, name: str):
        self.name = name
        self.default_user = ""
        self._backend = backend
        self._environment = environment
        self._engine: Engine | None = None
        self._created = False
        self._watch: asyncio.Task[None] | None = None
        self._over_storage = False

    async def start(self) -> AttachedStream:
        engine = self._engine = await self._backend.engines.take()
        try:
            return await self._start(engine)
        except InfraError:
            engine.failed()
            raise

    async def _start(self, engine: Engine) -> AttachedStream:
        image = await self._backend.image(engine, self._environment)
        self.default_user = await engine.call("inspect image", lambda: _image_user(engine, image))
        self._created = True
        try:
            await engine.call("create", lambda: self._create(engine, image))
        except docker.errors.APIError as error:
            raise InfraError(f"{engine.url}: create {self.name}: {error.explanation}") from error
        stream = await engine.attach(self.name)
        try:
            await engine.call("start", lambda: engine.client.api.start(self.name))
        except BaseException as error:
            await stream.close()
            if isinstance(error, docker.errors.APIError):
                raise self._cannot_start(image, str(error.explanation)) from error
            raise
        self._watch = asyncio.create_task(self._watch_storage(engine))
        return stream

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            if self._created:
                await engine.call("remove", lambda: remove_container(engine, self.name))
        finally:
            await self._backend.engines.free(engine)

    async def why_ended(self) -> InfraError | SandboxBrokenError:
        if self._over_storage:
            limit = self._environment.limits.storage_mb
            return SandboxBrokenError(f"{self.name} wrote more than its {limit} MB")
        engine = self._used_engine()
        try:
            state = await engine.call(
                "inspect", lambda: engine.client.api.inspect_container(self.name)["State"]
            )
        except docker.errors.APIError:  # removed by hand, by a janitor or by an engine's restart
            return InfraError(f"{engine.url}: container {self.name} is gone")
        except InfraError as error:
            return error
        if state.get("OOMKilled"):
            return SandboxBrokenError(f"{self.name}: out of memory down to its first process")
        return InfraError(f"{engine.url}: the connection to {self.name} ended")

    async def read_archive(self, src: str, *, max_bytes: int) -> Archive:
        engine = self._used_engine()
        try:
            return await engine.call(
                "read archive", _read_archive, engine, self.name, src, max_bytes
            )
        except docker.errors.NotFound as error:
            raise FileNotFoundError(f"no {src} in sandbox {self.name}") from error
        except docker.errors.APIError as error:
            raise SandboxBrokenError(f"{self.name}: reading {src}: {error.explanation}") from error

    async def write_archive(self, archive: Archive, parent: str) -> None:
        engine = self._used_engine()
        archive.file.seek(0)
        try:
            await engine.call(
                "write archive",
                lambda: engine.client.api.put_archive(self.name, parent, archive.file),
            )
        except docker.errors.APIError as error:
            raise SandboxBrokenError(
                f"{self.name}: writing below {parent}: {error.explanation}"
            ) from error

    def _create(self, engine: Engine, image: str) -> None:
        environment, limits = self._environment, self._environment.limits
        memory_bytes, file_bytes = limits.memory_mb << 20, limits.storage_mb << 20
        ulimits = [
            docker.types.Ulimit(name="nofile", soft=OPEN_FILES, hard=OPEN_FILES),
            docker.types.Ulimit(name="core", soft=0, hard=0),
            docker.types.Ulimit(name="fsize", soft=file_bytes, hard=file_bytes),
        ]
        api = engine.client.api
        host = api.create_host_config(
            auto_remove=True,
            mem_limit=memory_bytes,
            memswap_limit=memory_bytes,
            nano_cpus=int(limits.cpus * 1e9),
            pids_limit=limits.pids,
            network_mode="none" if environment.network is Network.NONE else "default",
            security_opt=["no-new-privileges"],
            cap_drop=["ALL"],
            cap_add=list(CAPABILITIES),
            ulimits=ulimits,
            log_config=docker.types.LogConfig(type="none"),  # output would fill the engine's disk
        )
        api.create_container_from_config(
            {
                "Image": image,
                "Hostname": "sandbox",
                "Entrypoint": first_command("ulimit -c 0"),
                "Cmd": [],
                "User": "0:0",
                "WorkingDir": environment.workdir,
                "Env": [f"{key}={value}" for key, value in _environment_of(environment).items()],
                "Labels": self._backend.labels,
                "AttachStdin": True,
                "AttachStdout": True,
                "OpenStdin": True,
                "StdinOnce": True,
                "NetworkDisabled": environment.network is Network.NONE,
                "HostConfig": host,
            },
            name=self.name,
        )

    def _cannot_start(self, image: str, problem: str) -> Exception:
        if "executable file not found" in problem or "no such file or directory" in problem:
            return RefusedError(f"image {image} has no bash, which a sandbox's shell needs")
        return InfraError(f"{self._used_engine().url}: start {self.name}: {problem}")

    def _used_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"sandbox {self.name} is not started, or stopped")
        return self._engine

    async def _watch_storage(self, engine: Engine) -> None:
        """Removes the container once it has written more than it may: no driver here has quotas."""
        limit_bytes = self._environment.limits.storage_mb << 20
        with contextlib.suppress(InfraError, docker.errors.APIError):  # who asks next is told why
            while True:
                await asyncio.sleep(WATCH_S)
                if await engine.call("size", lambda: _size(engine, self.name)) > limit_bytes:
                    self._over_storage = True
                    await engine.call("remove", lambda: remove_container(engine, self.name))
                    return


def _environment_of(environment: Environment) -> Mapping[str, str]:
    return {"HOME": "/root", **environment.env}


def _image_user(engine: Engine, image: str) -> str:
    user = str(engine.client.api.inspect_image(image)["Config"].get("User") or "").partition(":")[0]
    return "" if user in ("root", "0") else user


def _size(engine: Engine, name: str) -> int:
    api = engine.client.api
    found = api.containers(all=True, size=True, filters={"name": f"^/{name}$"})
    return int(found[0].get("SizeRw") or 0) if found else 0


def remove_container(engine: Engine, name: str) -> None:
    """Removes it and waits until the engine has; 409 says that it is already doing so."""
    try:
        engine.client.api.remove_container(name, force=True, v=True)
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != 409:
            raise
        with contextlib.suppress(docker.errors.NotFound):
            engine.client.api.wait(name, timeout=60, condition="removed")


def _read_archive(engine: Engine, name: str, src: str, max_bytes: int) -> Archive:
    chunks: Any
    chunks, _ = engine.client.api.get_archive(name, str(PurePosixPath(src)))
    file, deadline = spool(), time.monotonic() + TRANSFER_TIMEOUT_S
    try:
        for chunk in chunks:
            file.write(chunk)
            if time.monotonic() > deadline:
                raise SandboxBrokenError(f"{name}: no copy of {src} in {TRANSFER_TIMEOUT_S:g} s")
            if file.tell() > max_bytes:
                raise TooLargeError(f"{src} in {name} is larger than {max_bytes} bytes")
    except BaseException:
        file.close()
        raise
    finally:
        chunks.close()
    file.seek(0)
    return Archive(file)

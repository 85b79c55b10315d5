"""Sandboxes for tests: both back ends, and a Docker Engine, started by hand where none answers."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox.base import BASE_IMAGE, Environment, Limits, Network, Sandbox, make_backend

ROOT = Path(__file__).parents[2]
R = TypeVar("R")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
BACKENDS = ["local", pytest.param("docker", marks=pytest.mark.docker)]


class EngineProcess:
    """One dockerd with everything it writes in one directory, and its socket."""

    def __init__(self, folder: Path):
        self.folder = folder
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.sockets = Path(f"/tmp/t1jax-engine-{name}")  # a path of a socket must be short
        self.url = f"unix://{self.sockets}/docker.sock"

    @property
    def pid(self) -> int:
        """Its process, 0 where none runs."""
        try:
            pid = int((self.folder / "pid").read_text())
            return pid if "dockerd" in Path(f"/proc/{pid}/cmdline").read_text() else 0
        except (FileNotFoundError, ValueError):
            return 0

    def start(self) -> None:
        """Starts it and waits until it answers."""
        if shutil.which("dockerd") is None or os.geteuid() != 0:
            raise RuntimeError(
                "no Docker Engine answers, and none can be started: needs root and dockerd; "
                "run ./setup_sandbox.sh as root, or leave these tests out with -m 'not docker'"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        for stale in (self.folder / "pid", self.sockets / "exec/containerd/containerd.pid"):
            stale.unlink(missing_ok=True)  # of one that was killed
        with open(self.folder / "log", "ab") as log:
            daemon = subprocess.Popen(self._command(), stdout=log, stderr=log, process_group=0)
        daemon.returncode = 0  # it is ended by its number, maybe by another process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            if time.monotonic() > deadline:
                tail = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"dockerd does not answer after {START_TIMEOUT_S} s: {tail}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """True where the engine answers."""
        return engine_answers(self.url)

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Ends it with a signal and waits until it is gone."""
        pid = self.pid
        if not pid:
            return
        os.kill(pid, how)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.pid and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):  # of another test process, then
            os.waitpid(pid, 0)

    def stop(self) -> None:
        """Ends it in order, its containers included."""
        self.kill(signal.SIGTERM)
        self.kill()
        for line in Path("/proc/mounts").read_text().splitlines():
            mounted = line.split()[1]
            if mounted.startswith((f"{self.sockets}/", f"{self.folder}/")):  # after a kill
                subprocess.run(["umount", "--lazy", mounted], check=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _command(self) -> list[str]:
        return [
            "dockerd",
            f"--host={self.url}",
            f"--data-root={self.folder / 'data'}",
            f"--exec-root={self.sockets / 'exec'}",
            f"--pidfile={self.folder / 'pid'}",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--exec-opt=native.cgroupdriver=cgroupfs",
        ]


def engine_answers(url: str) -> bool:
    """True where an engine answers at this address."""
    command = ["docker", "--host", url, "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """The address of an engine that has the base image; shared by all test processes.

    Every process holds the lock `users` shared while it uses the engine, and the last one stops it;
    `turn` is held for a moment, while it is looked at, started or stopped.
    """
    url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if engine_answers(url):
        make_base_image(url)
        yield url
        return
    process = EngineProcess(ROOT / ".cache" / "engine")
    process.folder.mkdir(parents=True, exist_ok=True)
    with open(process.folder / "turn", "w") as turn, open(process.folder / "users", "w") as users:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        if not process.answers():
            process.start()
        make_base_image(process.url)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield process.url
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another test process still uses it
        process.stop()


def make_base_image(url: str) -> None:
    """`make image` on this engine; returns at once where it has been made."""
    subprocess.run(
        [str(ROOT / "sandbox" / "images" / "make_base.sh")],
        env={**os.environ, "DOCKER_HOST": url, "PYTHON": sys.executable},
        check=True,
    )


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each back end in turn."""
    return str(request.param)


@pytest.fixture
def endpoints(request: pytest.FixtureRequest, kind: str) -> str:
    """The engines of the back end; only docker needs any."""
    return str(request.getfixturevalue("engine")) if kind == "docker" else ""


class Boxes:
    """Runs a coroutine with started sandboxes of one back end."""

    def __init__(self, kind: str, endpoints: str):
        self.kind = kind
        self.endpoints = endpoints

    def environment(self, **changes: object) -> Environment:
        """A small sandbox without network; by default of the base image."""
        plain: dict[str, object] = {
            "name": "test",
            "image": BASE_IMAGE,
            "local": True,
            "workdir": "/app",
            "network": Network.NONE,
            "limits": Limits(memory_mb=256, storage_mb=64, pids=64),
        }
        return Environment(**{**plain, **changes})  # type: ignore[arg-type]

    def run(
        self, use: Callable[..., Awaitable[R]], count: int = 1, **changes: object
    ) -> R:
        """Gives `use` that many sandboxes; stops them and the back end afterwards."""
        return asyncio.run(self._run(use, count, changes))

    async def _run(
        self, use: Callable[..., Awaitable[R]], count: int, changes: dict[str, object]
    ) -> R:
        backend = make_backend(self.kind, endpoints=self.endpoints)
        boxes: list[Sandbox] = [
            backend.sandbox(self.environment(**changes)) for _ in range(count)
        ]
        try:
            for box in boxes:
                await box.start()
            return await use(*boxes)
        finally:
            for box in boxes:
                await box.stop()
            await backend.close()


@pytest.fixture
def boxes(kind: str, endpoints: str) -> Boxes:
    """`boxes.run(use)` calls `use(box)` with a sandbox of each back end in turn."""
    return Boxes(kind, endpoints)


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine of one test's own, which it may kill."""
    process = EngineProcess(tmp_path / "engine")
    process.start()
    yield process
    process.stop()

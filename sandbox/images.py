"""Images: built once per content, pulled with patience, shared by every process of every run.

A build's tag is a hash of everything that it reads from the context. Processes of one machine wait
for each other through a lock file; the engine itself would build the same thing twice.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import stat
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import docker.errors
import requests.exceptions
import urllib3.exceptions

from sandbox.base import BuildError, Environment, InfraError
from sandbox.engine import Engine
from sandbox.toolchain import cache_dir
from t1jax.errors import UserError

REPOSITORY = "t1jax/task"
PULL_TRIES = 4
PULL_WAIT_S = 2.0  # doubled after every try, with jitter
LOCK_POLL_S = 0.2
LOG_LINES = 30
TRANSIENT = ("timeout", "timed out", "toomanyrequests", "connection", "eof", "temporar", "503")


async def ensure_image(engine: Engine, environment: Environment, *, build_network: str) -> str:
    """The name of the environment's image on this engine, built or pulled if it is not there."""
    if environment.image:
        return await _pull(engine, environment.image)
    if environment.context is None:
        raise UserError(f"{environment.name}: neither an image nor a build context")
    tag = f"{REPOSITORY}:{await asyncio.to_thread(context_hash, environment.context)}"
    if await has_image(engine, tag):
        return tag
    async with _build_lock(tag):
        if not await has_image(engine, tag):
            await _build(engine, environment, tag, build_network)
    return tag


def context_hash(context: Path) -> str:
    """A hash of every file's path, mode and content; times and owners do not matter."""
    if not (context / "Dockerfile").is_file():
        raise UserError(f"{context} has no Dockerfile; expected one to build the image from")
    whole = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        status = path.lstat()
        what = os.readlink(path).encode() if path.is_symlink() else b""
        if stat.S_ISREG(status.st_mode):
            what = hashlib.sha256(path.read_bytes()).digest()
        name = str(path.relative_to(context))
        whole.update(repr((name, stat.filemode(status.st_mode), what)).encode())
    return whole.hexdigest()[:24]


async def has_image(engine: Engine, name: str) -> bool:
    """True where the engine has it."""
    try:
        await engine.call("inspect image", lambda: engine.client.images.get(name))
    except docker.errors.ImageNotFound:
        return False
    return True


async def _build(engine: Engine, environment: Environment, tag: str, network: str) -> None:
    try:
        await engine.call("build", _build_blocking, engine, environment, tag, network)
    except docker.errors.APIError as error:  # a Dockerfile that does not parse, for one
        raise BuildError(f"{environment.name}: {error.explanation}") from error


def _build_blocking(engine: Engine, environment: Environment, tag: str, network: str) -> None:
    """Follows the build's messages; closing the connection makes the engine stop building."""
    log: list[str] = []
    with engine.connection(timeout_s=environment.build_timeout_s) as (api, responses):
        try:
            messages = api.build(
                path=str(environment.context), tag=tag, rm=True, forcerm=True, decode=True,
                network_mode=network, labels={"t1jax.task": environment.name},
            )  # fmt: skip
            _follow(messages, environment, log)
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            if "timed out" not in str(error):
                raise
            raise BuildError(_failed(environment, _too_long(environment), log)) from error
        finally:
            for response in responses:
                response.close()


def _follow(messages: Iterable[dict[str, Any]], environment: Environment, log: list[str]) -> None:
    deadline = time.monotonic() + environment.build_timeout_s
    finished = False
    for message in messages:
        log += str(message.get("stream", "")).splitlines()
        finished = finished or "aux" in message
        if "error" in message:
            raise BuildError(_failed(environment, str(message["error"]), log))
        if time.monotonic() > deadline:
            raise BuildError(_failed(environment, _too_long(environment), log))
    if not finished:
        raise InfraError(f"the build of {environment.name} was cut off")


def _too_long(environment: Environment) -> str:
    return f"it took longer than {environment.build_timeout_s:g} s"


def _failed(environment: Environment, reason: str, log: list[str]) -> str:
    last = "\n".join(line for line in log[-LOG_LINES:] if line.strip())
    return f"{environment.name}: its Dockerfile does not build: {reason}\n{last}"


async def _pull(engine: Engine, image: str) -> str:
    if await has_image(engine, image):
        return image
    for attempt in range(PULL_TRIES):
        try:
            await engine.call("pull", lambda: engine.client.api.pull(image))
            return image
        except (docker.errors.APIError, InfraError) as error:
            problem: Any = error
            if not _transient(str(error)) or attempt == PULL_TRIES - 1:
                break
        await asyncio.sleep(PULL_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
    raise InfraError(
        f"cannot pull {image} to {engine.url}: {problem}; check the name and the network, "
        "or load it there with `docker load`"
    ) from problem


def _transient(problem: str) -> bool:
    return any(word in problem.lower() for word in TRANSIENT)


@contextlib.asynccontextmanager
async def _build_lock(tag: str) -> AsyncIterator[None]:
    """Held by one process of this machine at a time, and given back by the kernel if it dies."""
    folder = cache_dir() / "builds"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / tag.rpartition(":")[2], "w") as lock:
        while not _locked(lock.fileno()):
            await asyncio.sleep(LOCK_POLL_S)
        yield


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Docker Engines: which there are, how full they are, and calls that a cancelled trial awaits.

The SDK blocks, so its calls run in threads; a call whose caller is cancelled is awaited all the
same, so that nothing is created behind the back of who would remove it. Attaching to a container
is done here in asyncio, over a unix socket or TCP.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import docker
import docker.errors
import requests
import requests.exceptions
import urllib3.exceptions
from docker import DockerClient
from docker.utils import kwargs_from_env

from sandbox.base import InfraError
from t1jax.errors import UserError

LOCAL_ENGINE = "unix:///var/run/docker.sock"
DEFAULT_CAPACITY = 64
CALL_TIMEOUT_S = 120
THREADS = 16
CONNECT_TIMEOUT_S = 30.0
SUSPECT_S = 30.0
FRAME_HEADER_BYTES = 8

# What the SDK raises when a connection fails or breaks off; streams raise urllib3's own errors.
BROKEN = (
    docker.errors.DockerException,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
)
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """One engine and how many sandboxes it takes at a time."""

    url: str
    capacity: int = DEFAULT_CAPACITY

    def __post_init__(self) -> None:
        if urllib.parse.urlparse(self.url).scheme not in ("unix", "tcp", "http", "https"):
            raise UserError(
                f"engine {self.url!r}; expected unix:///path or tcp://host:port "
                "(for ssh:// forward the remote socket: ssh -L /tmp/docker.sock:/run/docker.sock)"
            )
        if self.capacity < 1:
            raise UserError(f"engine {self.url} has capacity {self.capacity}; expected at least 1")


def parse_endpoints(text: str) -> list[EndpointConfig]:
    """Reads "URL=CAPACITY,URL"; empty means DOCKER_HOST or the local engine."""
    if not text:
        return [EndpointConfig(url=os.environ.get("DOCKER_HOST") or LOCAL_ENGINE)]
    found = []
    for part in text.split(","):
        url, _, capacity = part.strip().partition("=")
        if capacity and not capacity.isdigit():
            raise UserError(f"endpoint {part!r}; expected URL=CAPACITY with a whole number")
        found.append(
            EndpointConfig(url=url, capacity=int(capacity) if capacity else DEFAULT_CAPACITY)
        )
    return found


def _connect_once(url: str) -> None:
    """Raises OSError where nothing listens; the SDK would leave its own socket open then."""
    address = urllib.parse.urlparse(url)
    if address.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            probe.connect(address.path)


class Engine:
    """One engine: its SDK client, its threads, and how many sandboxes it has of us."""

    def __init__(self, config: EndpointConfig):
        self.url = config.url
        self.capacity = config.capacity
        self.used = 0
        self._failed_s = -math.inf
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "engine")
        self._client: DockerClient | None = None

    @property
    def client(self) -> DockerClient:
        """Made at first use, in a thread: it asks the engine for its version."""
        if self._client is None:
            _connect_once(self.url)
            tls = kwargs_from_env().get("tls", False)
            self._client = DockerClient(
                base_url=self.url, version="auto", timeout=CALL_TIMEOUT_S, tls=tls,
                max_pool_size=THREADS,
            )  # fmt: skip
        return self._client

    @contextlib.contextmanager
    def connection(
        self, *, timeout_s: float
    ) -> Iterator[tuple[docker.APIClient, list[requests.Response]]]:
        """A client of one's own for a long stream, and the responses it got, to be closed."""
        tls = kwargs_from_env().get("tls", False)
        api = docker.APIClient(base_url=self.url, version="auto", timeout=timeout_s, tls=tls)
        responses: list[requests.Response] = []
        api.hooks["response"].append(lambda response, **_: responses.append(response))
        try:
            yield api, responses
        finally:
            api.close()

    async def call(self, what: str, function: Callable[P, R], *args: P.args, **kw: P.kwargs) -> R:
        """The function's result; InfraError, with `what` was asked, where the engine fails.

        What the engine answers with 4xx is the caller's to judge and passes through.
        """
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, lambda: function(*args, **kw))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            running.exception()
            raise
        except docker.errors.APIError as error:
            if error.is_client_error():
                raise
            raise InfraError(f"{self.url}: {what}: {error}") from error
        except BROKEN as error:
            raise InfraError(f"{self.url}: {what}: {type(error).__name__}: {error}") from error

    def failed(self) -> None:
        """Remembers a failure: others are taken before it for a while."""
        self._failed_s = time.monotonic()

    @property
    def suspect(self) -> bool:
        """True for a while after a failure."""
        return time.monotonic() - self._failed_s < SUSPECT_S

    async def reachable(self) -> bool:
        """True where it answers."""
        try:
            return bool(await self.call("ping", lambda: self.client.ping()))
        except (InfraError, docker.errors.APIError):
            return False

    async def attach(self, container: str) -> "AttachedStream":
        """Standard input and output of a container that has not started yet."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await self._connect()
                try:
                    await _upgrade(reader, writer, f"/containers/{container}/attach")
                except BaseException:
                    writer.close()
                    raise
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise InfraError(f"{self.url}: attach: {type(error).__name__}: {error}") from error
        return AttachedStream(reader, writer)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        if self._client is not None:
            self._client.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urllib.parse.urlparse(self.url)
        if parts.scheme == "unix":
            return await asyncio.open_unix_connection(parts.path)
        tls = kwargs_from_env().get("tls")
        context = None
        if tls or parts.scheme == "https":
            context = ssl.create_default_context(cafile=tls.ca_cert if tls else None)
            if tls and tls.cert:
                context.load_cert_chain(*tls.cert)
        return await asyncio.open_connection(parts.hostname, parts.port or 2375, ssl=context)


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    """Turns an HTTP connection into the container's own stream."""
    writer.write(
        f"POST {path}?stream=1&stdin=1&stdout=1 HTTP/1.1\r\nHost: docker\r\n"
        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if (status := head.split(b" ", 2)[1]) not in (b"101", b"200"):
        raise OSError(f"HTTP status {status.decode()}")


class AttachedStream:
    """A hijacked connection: raw bytes in; out, frames of which only standard output is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._left_bytes = 0  # of the frame being read

    async def read(self) -> bytes:
        try:
            if self._left_bytes == 0:
                header = await self._reader.readexactly(FRAME_HEADER_BYTES)
                self._left_bytes = int.from_bytes(header[4:], "big")
            chunk = await self._reader.read(self._left_bytes)
        except asyncio.IncompleteReadError:
            return b""
        self._left_bytes -= len(chunk)
        return chunk

    async def write(self, request: bytes) -> None:
        self._writer.write(request)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Engines:
    """Spreads sandboxes over engines by the share of their capacity that is free."""

    def __init__(self, configs: list[EndpointConfig]):
        self.all = [Engine(config) for config in configs]
        self._freed = asyncio.Condition()

    async def take(self) -> Engine:
        """A place on the emptiest engine, to be freed; waits while every one is full."""
        async with self._freed:
            await self._freed.wait_for(lambda: any(e.used < e.capacity for e in self.all))
            free = [engine for engine in self.all if engine.used < engine.capacity]
            engine = min(free, key=lambda e: (e.suspect, e.used / e.capacity))
            engine.used += 1
            return engine

    async def free(self, engine: Engine) -> None:
        """Gives a place back."""
        async with self._freed:
            engine.used -= 1
            self._freed.notify()

    def close(self) -> None:
        for engine in self.all:
            engine.close()



"""The byte stream to a sandbox's first process (warden.bash): requests in, output and answers out.

Tells answers from output by a nonce, which is random and used once. Knows the stream's two ends and
nothing of the back end that made it.
"""

import asyncio
import secrets
from typing import NamedTuple, Protocol

CHUNK_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 14  # its longest part is a directory's name


class Stream(Protocol):
    """Bytes to and from the first process."""

    async def read(self) -> bytes:
        """The next bytes of output; empty at its end."""

    async def write(self, request: bytes) -> None: ...

    async def close(self) -> None: ...


class StreamEndedError(Exception):
    """The first process, or what connects to it, is gone."""


class Answer(NamedTuple):
    kind: str  # done: by the session itself; gone: its shell ended; absent: it had; ok: by warden
    status: int
    rest: str


class Capture:
    """The head and the tail of an output, and how much there was between them."""

    def __init__(self, max_bytes: int):
        self._head_bytes = max_bytes // 2
        self._tail_bytes = max_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out_bytes = 0

    @property
    def truncated(self) -> bool:
        """True where the middle is missing."""
        return self._left_out_bytes + max(0, len(self._tail) - self._tail_bytes) > 0

    def add(self, output: bytes | bytearray) -> None:
        """Takes the next bytes; holds at most twice `max_bytes` at any time."""
        room = self._head_bytes - len(self._head)
        self._head += output[:room]
        self._tail += output[room:]
        if len(self._tail) > 2 * self._tail_bytes + CHUNK_BYTES:
            self._trim()

    def text(self) -> str:
        """What was captured, with one line in place of what was left out."""
        self._trim()
        if not self.truncated:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[… {self._left_out_bytes} bytes left out …]\n{tail}"

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            del self._tail[:excess]
            self._left_out_bytes += excess


class Channel:
    """Asks one thing at a time; what is printed until the answer belongs to it.

    Output that comes while nothing is asked (of a background job) is kept, bounded, and opens the
    next output, as a terminal would show it there.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._idle = self._capture = Capture(CHUNK_BYTES)
        self._held = bytearray()  # where an answer may begin
        self._nonce = b""
        self._answer: asyncio.Future[Answer] | None = None
        self._end: StreamEndedError | None = None
        self._pump = asyncio.create_task(self._read())

    @property
    def pending(self) -> "asyncio.Future[Answer] | None":
        """The answer that is still to come, if any."""
        return self._answer if self._answer is not None and not self._answer.done() else None

    async def ask(
        self, verb: str, *words: str, payload: bytes = b"", capture: Capture | None = None
    ) -> "asyncio.Future[Answer]":
        """Sends a request; its answer is the future, its output goes to `capture`."""
        if self.pending is not None:
            raise RuntimeError(f"{verb} asked of a sandbox that has not answered yet")
        nonce = secrets.token_hex(16)
        self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        if capture is not None:
            capture.add(self._idle.text().encode())
            self._idle = Capture(CHUNK_BYTES)
            self._capture = capture
        self._nonce = nonce.encode()
        if self._end is not None:
            self._fail(self._end)
        else:
            await self._send(nonce, verb, words, payload)
        return answer

    async def tell(self, verb: str, *words: str) -> None:
        """Sends what is not answered."""
        await self._send("-", verb, words, b"")

    def forget_output(self) -> None:
        """Drops what was printed while nothing was asked."""
        self._idle = self._capture = Capture(CHUNK_BYTES)

    async def close(self) -> None:
        """Ends both directions; an answer still awaited fails."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._stream.close()

    async def _send(self, nonce: str, verb: str, words: tuple[str, ...], payload: bytes) -> None:
        try:
            await self._stream.write(" ".join((verb, nonce, *words)).encode() + b"\n" + payload)
        except OSError as error:
            self._fail(StreamEndedError(str(error)))

    async def _read(self) -> None:
        end = StreamEndedError("the stream ended")
        try:
            while output := await self._stream.read():
                self._feed(output)
        except OSError as error:
            end = StreamEndedError(f"{type(error).__name__}: {error}")
        finally:
            self._fail(end)

    def _fail(self, end: StreamEndedError) -> None:
        self._end = end
        if (answer := self.pending) is not None:
            answer.set_exception(end)
            answer.exception()  # asyncio complains of one that nobody awaited

    def _feed(self, output: bytes) -> None:
        self._held += output
        if self.pending is None:
            self._release(len(self._held))
            return
        begin = self._held.find(self._nonce)
        if begin < 0:
            self._release(len(self._held) - len(self._nonce) + 1)
            return
        self._release(begin)
        end = self._held.find(b"\0")
        if end >= 0:
            self._settle(bytes(self._held[:end]), end)
        elif len(self._held) > MAX_ANSWER_BYTES:
            self._fail(StreamEndedError("an answer without an end"))

    def _release(self, count_bytes: int) -> None:
        if count_bytes > 0:
            self._capture.add(self._held[:count_bytes])
            del self._held[:count_bytes]

    def _settle(self, line: bytes, end: int) -> None:
        answer = self.pending
        assert answer is not None
        self._capture = self._idle
        del self._held[: end + 1]
        fields = line.decode("utf-8", "surrogateescape").split(" ", 3)
        if len(fields) < 3 or not fields[2].isdigit():
            self._fail(StreamEndedError(f"an answer that is none: {line[:80]!r}"))
            return
        answer.set_result(Answer(fields[1], int(fields[2]), fields[3] if len(fields) > 3 else ""))
        self._release(len(self._held))

"""The scheduler: requests from asyncio in, completions out; one thread owns the engine.

    async with Scheduler(engine, params, config.sampler, version=0) as scheduler:
        completion = await scheduler.complete(request)   # cancelled, it gives its slot back
        await scheduler.swap(new_params, version=1)

Owns the thread, the queue into it and the way back; `rounds` decides what runs. A request is
checked before it enters the queue. An error of the engine is given to every request that is under
way, and to each one after it; the process lives on.

Not covered: several engines; deadlines, which are the caller's (cancel); a request that may span
two weight versions.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Protocol, Self

import jax
import numpy as np

from t1jax.config import SamplerSection
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Params
from t1jax.sampling import sampler
from t1jax.sampling.engine import T1Engine
from t1jax.sampling.programs import STOPS, Sizes
from t1jax.sampling.rounds import Answer, Counters, Job, Piece, Rounds, Swap
from t1jax.trajectory.completion import Completion, ContextFullError, Request, RequestError

IDLE_S = 60.0  # then an empty round tells the other hosts that this one lives
COMPILED = "/jax/core/compile/backend_compile_duration"


class QueueFullError(RequestError):
    """More requests wait than `sampler.waiting` allows."""


class ClosedError(UserError):
    """The scheduler was closed, or its engine failed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Submit:
    number: int
    request: Request
    streamed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewWeights:
    version: int
    restart: bool


@dataclasses.dataclass(frozen=True)
class Stop:
    pass


Command = Submit | Cancel | NewWeights | Stop


class Link(Protocol):
    """How the processes of several hosts come to hear the same commands."""

    leads: bool  # whether requests are taken here

    def share(self, commands: list[Command]) -> list[Command]: ...


class Alone:
    """One process."""

    leads = True

    def share(self, commands: list[Command]) -> list[Command]:
        return commands


class _Client:
    """Takes answers from the engine's thread to the event loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.submitted_s = time.perf_counter()

    def post(self, answer: Answer | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)
        except RuntimeError:  # the loop is closed: the client is gone, and nobody waits
            if not self._loop.is_closed():
                raise

    async def next(self) -> Answer | None:
        answer = await self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Scheduler:
    """Answers requests with one engine; see the module."""

    def __init__(
        self,
        engine: T1Engine,
        params: Params,
        options: SamplerSection,
        *,
        version: int = 0,
        link: Link | None = None,
    ):
        if engine.sizes != sizes_of(options):
            raise UserError(f"an engine of {engine.sizes} and a scheduler of {options}")
        self._engine, self._options = engine, options
        self._link = Alone() if link is None else link
        self._rounds = Rounds(engine, params, options, version)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._clients: dict[int, _Client] = {}
        self._swaps: queue.SimpleQueue[tuple[Params, _Client]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="t1jax-engine", daemon=True)
        self._thread.start()

    # ---- asyncio's side -------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """Answers one request. A cancelled call gives its slot back.

        Raises:
          RequestError: the request cannot be answered (ContextFullError, QueueFullError).
          ClosedError: the scheduler was closed, or its engine failed.
        """
        number, client = self._submit(request, streamed=False)
        try:
            answer = await client.next()
        except BaseException:
            self._cancel(number)
            raise
        del self._clients[number]
        assert isinstance(answer, Completion)
        return answer

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Completion, None]:
        """Tokens as they are sampled, and at last the whole Completion (which has them all).

        The last tokens come with the Completion alone. Closing the generator gives the slot back.
        """
        number, client = self._submit(request, streamed=True)
        try:
            while True:
                answer = await client.next()
                assert isinstance(answer, Piece | Completion)
                if isinstance(answer, Completion):
                    del self._clients[number]
                yield answer
                if isinstance(answer, Completion):
                    return
        finally:
            self._cancel(number)

    async def swap(self, params: Params, version: int, *, restart: bool = False) -> None:
        """New weights for every request that begins from now on; returns when they are in use.

        Requests that run finish on the old ones first; with `restart` they begin again on the new
        ones. Kept caches are forgotten. With several hosts every process calls it.
        """
        self._refuse_closed()
        client = _Client()
        self._swaps.put((params, client))
        if self._link.leads:
            self._inbox.put(NewWeights(version=version, restart=restart))
        await client.next()

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._rounds.version

    @property
    def counters(self) -> Counters:
        """A copy of what has been counted."""
        return dataclasses.replace(self._rounds.counters)

    async def close(self) -> None:
        """Ends the thread; requests under way are refused."""
        if self._link.leads:
            self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _submit(self, request: Request, *, streamed: bool) -> tuple[int, _Client]:
        self._refuse_closed()
        check(request, self._engine)
        most = self._options.waiting + self._options.slots
        if len(self._clients) >= most:
            raise QueueFullError(
                f"{len(self._clients)} requests run or wait, and sampler.waiting="
                f"{self._options.waiting} besides {self._options.slots} slots allows {most}; ask "
                "again later, or raise it"
            )
        if not self._link.leads:
            raise UserError("requests are taken by process 0 alone")
        number, client = next(self._numbers), _Client()
        self._clients[number] = client
        request = dataclasses.replace(request, prompt=request.prompt.astype(np.int32))
        self._inbox.put(Submit(number=number, request=request, streamed=streamed))
        self._refuse_closed()  # the thread may have ended meanwhile
        return number, client

    def _cancel(self, number: int) -> None:
        """Ends a request that has had no Completion."""
        if self._clients.pop(number, None) is not None:
            self._inbox.put(Cancel(number=number))

    def _refuse_closed(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"the engine has ended: {self._failure!r}") from self._failure

    # ---- the engine's thread --------------------------------------------------------------------

    def _work(self) -> None:
        stop_counting = self._count_compilations()
        try:
            self._until_stopped()
            self._failure = ClosedError("the scheduler is closed")
        except BaseException as error:
            self._failure = error
        finally:
            stop_counting()
            self._refuse_all()

    def _until_stopped(self) -> None:
        while True:
            for command in self._link.share(self._commands()):
                if isinstance(command, Stop):
                    return
                self._obey(command)
            self._rounds.round()

    def _commands(self) -> list[Command]:
        """What has come; waits a while where there is nothing else to do."""
        if not self._link.leads:
            return []
        commands = []
        if not self._rounds.busy:
            with contextlib.suppress(queue.Empty):
                commands.append(self._inbox.get(timeout=IDLE_S))
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            client = self._clients.get(command.number)
            self._rounds.submit(Job(
                number=command.number, request=command.request, streamed=command.streamed,
                answer=(lambda answer: None) if client is None else client.post,
                submitted_s=time.perf_counter() if client is None else client.submitted_s,
            ))  # fmt: skip
        elif isinstance(command, Cancel):
            self._rounds.cancel(command.number)
        elif isinstance(command, NewWeights):
            self._swap(command)

    def _swap(self, command: NewWeights) -> None:
        params, client = self._swaps.get()  # on other hosts the weights may come a little later
        try:
            self._rounds.swap(Swap(
                params=params, version=command.version, restart=command.restart,
                done=lambda: client.post(None),
            ))  # fmt: skip
        except UserError as error:
            client.post(error)

    def _refuse_all(self) -> None:
        error = ClosedError(f"the engine has ended: {self._failure!r}")
        for client in list(self._clients.values()):
            client.post(error)
        while not self._swaps.empty():
            self._swaps.get()[1].post(error)

    def _count_compilations(self) -> Callable[[], None]:
        """Counts what this thread compiles; returns what ends the counting."""
        mine, counters = threading.get_ident(), self._rounds.counters

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event == COMPILED and threading.get_ident() == mine:
                counters.compilations += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
        return lambda: jax.monitoring.unregister_event_duration_listener(listen)


def sizes_of(options: SamplerSection) -> Sizes:
    """The engine's shapes that a config asks for."""
    return Sizes(
        slots=options.slots, context=options.context, prefill_chunk=options.prefill_chunk,
        capture_routes=options.capture_routes,
    )  # fmt: skip


def check(request: Request, engine: T1Engine) -> None:
    """Refuses what no round could answer, naming the field and what is allowed.

    Raises:
      RequestError: and ContextFullError where the prompt leaves no room.
    """
    prompt, vocab, context = request.prompt, engine.config.vocab, engine.sizes.context
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or len(prompt) == 0:
        raise RequestError(
            f"prompt of shape {list(prompt.shape)}, {prompt.dtype}; expected integers [N], N >= 1"
        )
    if len(prompt) >= context:
        raise ContextFullError(
            f"a prompt of {len(prompt)} tokens leaves no room in sampler.context={context}"
        )
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens={request.max_tokens}; expected 1 or more")
    unknown = sorted(i for i in request.stop_ids if not 0 <= i < vocab)
    if unknown or len(request.stop_ids) > STOPS:
        raise RequestError(
            f"stop_ids={sorted(request.stop_ids)}; expected at most {STOPS} ids from 0 to "
            f"{vocab - 1}, the vocabulary's last"
        )
    asked = request.sampling
    try:
        engine.check_tokens(np.asarray(prompt))
        sampler.check(
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed
        )
    except ValueError as error:
        raise RequestError(str(error)) from None

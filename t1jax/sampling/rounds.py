"""Continuous batching, one round after another: which request is read, which decode, which wait.

A round reads waiting prompts into free slots, at most `prefill_chunk` tokens in all, and then takes
a decode step for every running slot. Requests go by age: a session is as old as its first request,
and a request of an older one takes the slot of the youngest running one, whose stream is kept and
goes on later. At the end of a session's turn its stream is kept for the next one. Nothing here
depends on time: equal calls in equal order give equal decisions, on every host.

Not covered: a request that may span two weight versions; slots of different contexts.
Knows nothing of asyncio or threads: it is called by one, and answers through callbacks.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from t1jax.config import SamplerSection
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Params
from t1jax.sampling.engine import Draw, Prefix, T1Engine
from t1jax.sampling.prefix_cache import Entry, PrefixCache
from t1jax.sampling.results import Result
from t1jax.trajectory.completion import Completion, Request
from t1jax.trajectory.record import Finish

MAX_SESSIONS = 65536  # whose age is remembered


class RestartedError(UserError):
    """A request that was streamed met new weights: what it has given out would not be repeated."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of a request that is still running."""

    ids: np.ndarray
    logprobs: np.ndarray


Answer = Completion | Piece | BaseException


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """A request on its way. Its tokens and routes survive preemption."""

    number: int
    request: Request
    answer: Callable[[Answer], None]
    streamed: bool
    submitted_s: float
    age: int = 0  # of its session; lower is older
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    filtered: list[float] = dataclasses.field(default_factory=list)
    first: int = -1  # where reading began; -1: not yet
    routes: list[np.ndarray] = dataclasses.field(default_factory=list)
    rows: int = 0  # of routes
    unfetched: Prefix | None = None  # read, its routes still on the device
    read_s: float = 0.0  # when reading began, and
    decode_s: float = 0.0  # when decoding did, last

    @property
    def key(self) -> str:
        """Under which its streams are kept."""
        return self.request.session or f"\0{self.number}"

    @property
    def stream(self) -> np.ndarray:
        return np.concatenate([self.request.prompt, np.asarray(self.ids, np.int32)])

    def add_routes(self, begin: int, routes: np.ndarray) -> None:
        """Rows for tokens `begin`..; those that are known already stay."""
        if self.first < 0:
            self.first = begin
        known = self.first + self.rows - begin
        assert known >= 0
        self.routes.append(routes[known:])
        self.rows += len(self.routes[-1])

    def restart(self) -> None:
        """Forgets what was sampled."""
        self.ids, self.logprobs, self.filtered = [], [], []
        self.first, self.routes, self.rows, self.unfetched = -1, [], 0, None


@dataclasses.dataclass(kw_only=True)
class Counters:
    """What the scheduler has done since it began."""

    prefill_tokens: int = 0  # read
    cached_tokens: int = 0  # not read, for a kept stream had them
    sampled_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    cached_bytes: int = 0
    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    compilations: int = 0
    engine_s: float = 0.0  # in calls of the engine, waiting for the device included
    host_s: float = 0.0  # the rest of the rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swap:
    """New weights, for when no request runs on the old ones."""

    params: Params
    version: int
    restart: bool
    done: Callable[[], None]


class Rounds:
    """Owns the engine's state: the slots, the queue, the kept streams and the weights."""

    def __init__(self, engine: T1Engine, params: Params, options: SamplerSection, version: int):
        self.engine, self.params, self.version = engine, params, version
        self.counters = Counters(free_slots=engine.max_concurrent_decodes)
        self._options = options
        self._state = engine.init_decode_state()
        self._free = list(range(engine.max_concurrent_decodes))
        self._running: dict[int, Job] = {}  # by slot
        self._reading: tuple[Job, int, Prefix] | None = None  # into which slot
        self._waiting: list[Job] = []
        self._cache = PrefixCache(options.cache_mb * 10**6)
        self._ages: dict[str, int] = {}
        self._swap: Swap | None = None

    @property
    def busy(self) -> bool:
        """Whether a round would do something."""
        return bool(self._running or self._waiting or self._reading or self._swap)

    # ---- commands -------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        job.age = self._ages.setdefault(job.key, job.number)
        while len(self._ages) > MAX_SESSIONS:
            del self._ages[next(iter(self._ages))]
        self._waiting.append(job)

    def cancel(self, number: int) -> None:
        """Forgets a request, wherever it is; one that is done already is no error."""
        for job in [job for job in self._waiting if job.number == number]:
            self._waiting.remove(job)
            self._forget(job)
        if self._reading is not None and self._reading[0].number == number:
            job, slot, _ = self._reading
            self._reading = None
            self._free.append(slot)
            self._forget(job)
        for slot, job in list(self._running.items()):
            if job.number == number:
                self._leave(slot)

    def swap(self, swap: Swap) -> None:
        """Takes new weights once nothing runs; `restart` begins what runs again instead."""
        if self._swap is not None or swap.version <= self.version:
            newest = self.version if self._swap is None else self._swap.version
            raise UserError(
                f"weights of version {swap.version} after version {newest}; expected a higher one, "
                "and one swap at a time"
            )
        self._swap = swap
        if swap.restart:
            self._restart_all()

    # ---- a round --------------------------------------------------------------------------------

    def round(self) -> None:
        """Reads some, decodes a step, answers what is finished."""
        began_s, engine_s = time.perf_counter(), self.counters.engine_s
        if self._swap is not None and not self._started():
            self._take_weights(self._swap)
        self._read_some()
        if self._running:
            self._decode()
        in_engine_s = self.counters.engine_s - engine_s
        self.counters.host_s += time.perf_counter() - began_s - in_engine_s
        self._show()

    def _show(self) -> None:
        """Brings up to date what the counters say of the present."""
        counters = self.counters
        counters.running, counters.waiting = len(self._running), len(self._waiting)
        counters.free_slots = len(self._free)
        counters.evictions, counters.cached_bytes = self._cache.evictions, self._cache.size_bytes

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.counters.engine_s += time.perf_counter() - began_s

    def _read_some(self) -> None:
        """Reads prompts, oldest first, up to the budget; each that is read begins to decode."""
        budget = self.engine.prefill_chunk_size
        while budget > 0:
            if self._reading is None and not self._begin_next():
                return
            assert self._reading is not None
            job, slot, prefix = self._reading
            left = job.stream[prefix.length - 1 :]
            if len(left) > 1:
                with self._in_engine():
                    longer = self.engine.extend(self.params, prefix, left)
                self.counters.prefill_tokens += longer.length - prefix.length
                budget -= self.engine.sizes.chunk(longer.length - prefix.length)
                prefix = longer
                self._reading = job, slot, prefix
            if prefix.length == len(job.request.prompt) + len(job.ids):
                self._reading = None
                self._run(job, slot, prefix)

    def _begin_next(self) -> bool:
        """Gives the oldest waiting request a slot; False where there is none."""
        allowed = [j for j in self._waiting if self._swap is None or j.ids]
        if not allowed:
            return False
        job = min(allowed, key=lambda j: (j.age, j.number))
        if not self._free and not self._preempt_for(job):
            return False
        self._waiting.remove(job)
        slot = min(self._free)
        self._free.remove(slot)
        job.read_s = job.read_s or time.perf_counter()
        stream = job.stream
        kept = self._cache.find(job.key, stream)
        with self._in_engine():
            if kept is None:
                prefix = self.engine.begin(None, first_token=stream[0], version=self.version)
            else:
                prefix = self.engine.begin(kept.prefix, version=self.version)
        self.counters.cached_tokens += prefix.length - 1
        self._reading = job, slot, prefix
        return True

    def _run(self, job: Job, slot: int, prefix: Prefix) -> None:
        """What was read begins to decode in its slot."""
        asked = job.request.sampling
        draw = Draw(
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed
        )
        with self._in_engine():
            self._state = self.engine.insert(
                prefix, self._state, slot, draw=draw, stop_ids=sorted(job.request.stop_ids),
                max_tokens=job.request.max_tokens - len(job.ids),
            )  # fmt: skip
        job.unfetched, job.decode_s = prefix, time.perf_counter()
        self._running[slot] = job

    def _decode(self) -> None:
        """A step, or several where nobody waits; answers what is finished."""
        idle = not self._waiting and self._reading is None
        steps = self._options.steps_per_round if idle else 1
        with self._in_engine():
            self._state, result = self.engine.generate(self.params, self._state, steps=steps)
            result = result.convert_to_numpy()
        self.counters.decode_steps += steps
        for slot, job in sorted(self._running.items()):
            self._add(job, slot, result, steps)

    def _add(self, job: Job, slot: int, result: Result, steps: int) -> None:
        """What a slot sampled joins its request; at its end the request is answered."""
        self._fetch_routes(job)
        n = int(result.data[slot, steps : 2 * steps].sum())
        ids, logprobs = result.data[slot, :n], result.raw_logprob[slot, :n]
        job.add_routes(len(job.request.prompt) + len(job.ids) - 1, result.routes[slot, :n])
        job.ids.extend(ids.tolist())
        job.logprobs.extend(logprobs.tolist())
        job.filtered.extend(result.filtered_logprob[slot, :n].tolist())
        self.counters.sampled_tokens += n
        if not np.isfinite(logprobs).all():
            self._leave(slot)
            job.answer(UserError(
                f"the log-prob of a sampled token is {logprobs.tolist()}: the weights of version "
                f"{self.version} hold NaN, or the dtype overflows"
            ))  # fmt: skip
            return
        stopped = job.ids[-1] in job.request.stop_ids
        if stopped or len(job.ids) >= self._limit(job):
            self._finish(job, slot, Finish.stop if stopped else Finish.length)
        elif job.streamed:
            job.answer(Piece(ids, logprobs))

    def _limit(self, job: Job) -> int:
        """How many tokens a request gets: what it asks for, or what the context has room for."""
        return min(job.request.max_tokens, self.engine.sizes.context - len(job.request.prompt))

    def _fetch_routes(self, job: Job) -> None:
        prefix, job.unfetched = job.unfetched, None
        if prefix is not None:
            job.add_routes(prefix.first, self._routes_of(prefix))

    def _routes_of(self, prefix: Prefix) -> np.ndarray:
        read = prefix.read_routes()
        if read.size:
            return read
        sizes, config = self.engine.sizes, self.engine.config
        layers = config.layers if sizes.capture_routes else 0
        return np.zeros((len(read), layers, config.moe.chosen), config.route_dtype)

    def _finish(self, job: Job, slot: int, finish: Finish) -> None:
        if job.request.session:
            self._keep(job, slot)
        self._leave(slot)
        now_s = time.perf_counter()
        job.answer(Completion(
            ids=np.asarray(job.ids, np.int32),
            logprobs=np.asarray(job.logprobs, np.float32),
            filtered_logprobs=np.asarray(job.filtered, np.float32),
            first=job.first,
            routes=np.concatenate(job.routes),
            version=self.version,
            finish=finish,
            seconds={
                "queue": job.read_s - job.submitted_s,
                "prefill": job.decode_s - job.read_s,
                "decode": now_s - job.decode_s,
            },
        ))  # fmt: skip

    def _leave(self, slot: int) -> None:
        """The slot is free, and decodes no longer."""
        job = self._running.pop(slot)
        with self._in_engine():
            self._state = self.engine.release(self._state, [slot])
        self._free.append(slot)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """A request without a session leaves nothing behind."""
        if not job.request.session:
            self._ages.pop(job.key, None)
            self._cache.forget(job.key)

    # ---- kept streams ---------------------------------------------------------------------------

    def _keep(self, job: Job, slot: int) -> None:
        stream = job.stream
        if self._kept_bytes(len(stream)) > self._options.cache_mb * 10**6:
            return
        with self._in_engine():
            prefix = self.engine.take(
                self._state, slot, length=len(stream), version=self.version
            )
        self._cache.keep(Entry(
            session=job.key, tokens=stream, prefix=prefix,
            size_bytes=self._kept_bytes(len(stream)),
        ))  # fmt: skip

    def _kept_bytes(self, tokens: int) -> int:
        return self.engine.programs.kept_bytes(tokens - 1)

    def _preempt_for(self, job: Job) -> bool:
        """Frees the slot of the youngest running request, where it is younger and can be kept."""
        if not self._running:
            return False
        slot, youngest = max(self._running.items(), key=lambda x: (x[1].age, x[1].number))
        room = self._options.cache_mb * 10**6 - self._cache.size_bytes
        if youngest.age <= job.age or self._kept_bytes(len(youngest.stream)) > room:
            return False
        self._fetch_routes(youngest)
        self._keep(youngest, slot)
        self._vacate(slot)
        self.counters.preemptions += 1
        return True

    def _vacate(self, slot: int) -> None:
        """A running request waits again; its age keeps its place."""
        self._waiting.append(self._running.pop(slot))
        with self._in_engine():
            self._state = self.engine.release(self._state, [slot])
        self._free.append(slot)

    # ---- weights --------------------------------------------------------------------------------

    def _started(self) -> bool:
        """Whether a request has tokens, or is about to, from the present weights."""
        return bool(self._running or self._reading or any(job.ids for job in self._waiting))

    def _restart_all(self) -> None:
        for slot in list(self._running):
            self._vacate(slot)
        if self._reading is not None:
            self._waiting.append(self._reading[0])
            self._free.append(self._reading[1])
            self._reading = None
        shown = [job for job in self._waiting if job.ids and job.streamed]
        self._waiting = [job for job in self._waiting if job not in shown]
        for job in shown:
            job.answer(RestartedError("new weights came while tokens were streamed; ask again"))
        for job in self._waiting:
            job.restart()

    def _take_weights(self, swap: Swap) -> None:
        with self._in_engine():
            self.params = self.engine.load_params(swap.params)
        self.version, self._swap = swap.version, None
        self._cache.clear()
        self._show()
        swap.done()

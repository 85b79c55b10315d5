"""A trajectory in the making: tokens are only ever appended, and sampled ids never re-encoded.

    recorder.append_context(prompt)
    recorder.append_sampled(ids, logprobs, version=3, finish=Finish.stop)
    recorder.record_routes(0, routes)            # rows 0.. of what the engine read
    recorder.append_context(tool_output)         # the native loop: always boundary rule 1
    trajectory = recorder.finish(ending)

A client that hands back whole conversations goes through `follow` instead of `append_context`.
Every change is an event, which a listener may write down; `replay` makes it again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t1jax.errors import UserError
from t1jax.trajectory import boundary, routes
from t1jax.trajectory.record import (
    Chunk,
    Ending,
    Finish,
    LogprobKind,
    RouteShape,
    Rule,
    Sampling,
    Trajectory,
    Turn,
    rows_of,
)

# A change: its name, plain facts, arrays.
Listener = Callable[[str, Mapping[str, Any], Mapping[str, np.ndarray]], None]
DAMAGE = {rule: severity for severity, rule in enumerate(Rule)}
PLAIN = Sampling()


class Growing:
    """An array that grows at its end; untouched room costs no memory."""

    def __init__(self, dtype: np.dtype, row: tuple[int, ...] = ()):
        self._room = np.zeros((1024, *row), dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """What has been appended: a view."""
        return self._room[: self._length]

    def resize(self, length: int) -> None:
        """Cuts, or adds zeros."""
        if length > len(self._room):
            rows = max(length, 2 * len(self._room))
            room = np.zeros((rows, *self._room.shape[1:]), self._room.dtype)
            room[: self._length] = self.values
            self._room = room
        self._room[length : self._length] = 0
        self._length = length

    def extend(self, values: np.ndarray) -> None:
        begin = self._length
        self.resize(begin + len(values))
        self._room[begin : self._length] = values


class _Stream:
    """The columns of a chunk that still grows. Routes have a row for every token here."""

    def __init__(self, shape: RouteShape):
        self.ids = Growing(np.dtype(np.int32))
        self.mask = Growing(np.dtype(bool))
        self.logprobs = Growing(np.dtype(np.float32))
        self.versions = Growing(np.dtype(np.int32))
        self.routes = Growing(shape.dtype, (shape.layers, shape.chosen))
        self.recorded = Growing(np.dtype(bool))
        self.turns: list[Turn] = []
        self.pending: Rule | None = None  # how what follows the last turn came to be
        self.unread = 0  # tokens before this one have a weight version

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def turn_end(self) -> int:
        """Where the last completion ended; what follows has been read by nobody."""
        return self.turns[-1].end if self.turns else 0

    def resize(self, length: int) -> None:
        for column in (self.ids, self.mask, self.logprobs, self.versions):
            column.resize(length)
        self.routes.resize(length)
        self.recorded.resize(length)


class Recorder:
    """Appends to one trajectory. `stream` is what the next completion continues."""

    def __init__(
        self,
        shape: RouteShape,
        *,
        sampling: Sampling = PLAIN,
        logprob_kind: LogprobKind = LogprobKind.raw,
        listener: Listener = lambda event, facts, arrays: None,
    ):
        self.shape, self._sampling, self._kind = shape, sampling, logprob_kind
        self._listener = listener
        self._done: list[_Stream] = []
        self._now = _Stream(shape)

    @property
    def stream(self) -> np.ndarray:
        """A copy of the current chunk's ids."""
        return self._now.ids.values.copy()

    def __len__(self) -> int:
        return len(self._now)

    def append_context(self, ids: np.ndarray, *, rule: Rule = Rule.strict) -> None:
        """Appends tokens that the policy did not sample."""
        ids = _as_ids(ids)
        if not self._done and not self._now.turns:
            rule = Rule.opening  # nothing was sampled yet, so nothing was joined to it
        self._listener("context", {"rule": rule.value}, {"ids": ids})
        self._extend(ids)
        pending = self._now.pending
        if pending is None or DAMAGE[rule] > DAMAGE[pending]:
            self._now.pending = rule

    def append_sampled(
        self, ids: np.ndarray, logprobs: np.ndarray, *, version: int, finish: Finish
    ) -> None:
        """Appends a completion, as sampled, by the weights of this version.

        Where an earlier chunk holds the same tokens after the same tokens, and sampled them, they
        are context here: what was sampled trains once.
        """
        ids = _as_ids(ids)
        logprobs = np.asarray(logprobs, np.float32)
        if ids.shape != logprobs.shape:
            raise UserError(f"{len(ids)} sampled tokens have {len(logprobs)} log-probs; "
                            "expected one each")  # fmt: skip
        facts = {"version": int(version), "finish": str(finish)}
        self._listener("sampled", facts, {"ids": ids, "logprobs": logprobs})
        now, first = self._now, len(self._now)
        self._extend(ids)
        fresh = ~self._trained_before(first)
        now.mask.values[first:] = fresh
        now.logprobs.values[first:] = np.where(fresh, logprobs, 0)
        now.versions.values[now.unread :] = version
        now.unread = len(now)
        now.turns.append(
            Turn(
                begin=now.turns[-1].end if now.turns else 0,
                sampled=first,
                end=len(now),
                rule=now.pending or Rule.strict,
                finish=Finish(finish),
            )
        )
        now.pending = None

    def record_routes(
        self, first: int, ids: np.ndarray, recorded: np.ndarray | None = None
    ) -> None:
        """Records what tokens `first`.. used as inputs. A row that is known already stays.

        Args:
          first: the token of the first row: where the engine's reading began.
          ids: [T, L, C]; a row for the last token (which some engines compute) is kept for later.
          recorded: bool [T]; None: all.
        """
        shape, now = self.shape, self._now
        recorded = np.ones(len(ids), bool) if recorded is None else recorded
        if ids.shape[1:] != (shape.layers, shape.chosen) or recorded.shape != ids.shape[:1]:
            raise UserError(
                f"routes of shape {list(ids.shape)} with {len(recorded)} marks; expected "
                f"[tokens, {shape.layers}, {shape.chosen}]: [token, layer, choice]"
            )
        if first < 0 or first + len(ids) > len(now):
            raise UserError(
                f"routes for tokens {first}..{first + len(ids) - 1} of a stream of {len(now)}; "
                "the row count does not match the tokens"
            )
        narrow = routes.narrow(ids, recorded, shape.experts, first)
        # Written down as they came: replaying makes the same choice of which rows are new.
        self._listener("routes", {"first": int(first)}, {"routes": narrow, "recorded": recorded})
        rows = slice(first, first + len(ids))
        new = recorded & ~now.recorded.values[rows]
        if new.all():
            now.routes.values[rows] = narrow
        else:
            now.routes.values[rows][new] = narrow[new]
        now.recorded.values[rows] |= recorded

    def follow(self, prompt: np.ndarray, language: boundary.Language) -> Rule:
        """Meets a whole conversation that a client hands back; the stream then ends where it does.

        Sample from `stream` afterwards, never from `prompt`: the two may differ in their ids.
        """
        prompt = _as_ids(prompt)
        if len(self._now) == 0:
            self.append_context(prompt)
            return Rule.opening
        met = boundary.meet(self._now.ids.values, self._now.mask.values, prompt, language)
        if met.rule is Rule.split:
            self.split()
        elif met.keep < len(self._now):
            self.drop_context(met.keep)
        self.append_context(met.append, rule=met.rule)
        return met.rule

    def split(self) -> None:
        """Ends the chunk and begins another; one in which nothing was sampled is left out."""
        self._listener("split", {}, {})
        if self._now.turns:
            self._done.append(self._now)
        self._now = _Stream(self.shape)

    def drop_context(self, keep: int) -> None:
        """Drops trailing context that no completion has followed."""
        if not self._now.turn_end <= keep <= len(self._now):
            raise UserError(
                f"cannot cut a stream of {len(self._now)} tokens to {keep}: tokens up to "
                f"{self._now.turn_end} were sampled or read, and a stream is append-only"
            )
        self._listener("drop", {"keep": int(keep)}, {})
        self._now.resize(keep)
        self._now.unread = min(self._now.unread, keep)

    def finish(self, ending: Ending) -> Trajectory:
        """The finished record, checked. It takes the memory; the recorder is empty afterwards."""
        streams = [*self._done, self._now] if len(self._now) else self._done
        trajectory = Trajectory(chunks=tuple(map(self._chunk, streams)), ending=ending)
        self._done, self._now = [], _Stream(self.shape)
        return trajectory

    def replay(
        self, event: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Makes a change again that a listener wrote down."""
        if event == "context":
            self.append_context(arrays["ids"], rule=Rule(facts["rule"]))
        elif event == "sampled":
            finish = Finish(facts["finish"])
            self.append_sampled(
                arrays["ids"], arrays["logprobs"], version=facts["version"], finish=finish
            )
        elif event == "routes":
            self.record_routes(facts["first"], arrays["routes"], arrays["recorded"])
        elif event == "split":
            self.split()
        elif event == "drop":
            self.drop_context(facts["keep"])
        else:
            raise UserError(f"a trajectory's log has event {event!r}; a newer t1jax wrote it")

    def _extend(self, ids: np.ndarray) -> None:
        begin = len(self._now)
        self._now.resize(begin + len(ids))
        self._now.ids.values[begin:] = ids

    def _trained_before(self, first: int) -> np.ndarray:
        """Which tokens from `first` on an earlier chunk sampled, after the very same tokens."""
        ids = self._now.ids.values
        trained = np.zeros(len(ids) - first, bool)
        for stream in self._done:
            common = boundary.common_prefix(ids, stream.ids.values)
            if common > first:
                trained[: common - first] |= stream.mask.values[first:common]
        return trained

    def _chunk(self, stream: _Stream) -> Chunk:
        # Trailing context was read by nobody: it counts to the weights before it.
        read = stream.versions.values[: stream.unread]
        stream.versions.values[stream.unread :] = read[-1] if len(read) else 0
        N = len(stream)
        return Chunk(
            ids=stream.ids.values,
            mask=stream.mask.values,
            logprobs=stream.logprobs.values,
            versions=stream.versions.values,
            routes=stream.routes.values[: rows_of("routes", N)],
            recorded=stream.recorded.values[: rows_of("recorded", N)],
            turns=tuple(stream.turns),
            shape=self.shape,
            sampling=self._sampling,
            logprob_kind=self._kind,
        )


def _as_ids(ids: np.ndarray) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"token ids of shape {list(ids.shape)}, {ids.dtype}; expected integers [N]")
    return ids.astype(np.int32)

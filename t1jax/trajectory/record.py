"""The one record of an episode: what the policy read and sampled, as the engine saw it.

THE COLUMN CONVENTION, for the whole project. Column t describes token t:

    ids[t]       the token
    mask[t]      True: the policy sampled it; False: it was given (prompt, template, tool output)
    logprobs[t]  the SAMPLER's log-probability of token t after tokens 0..t-1; 0 where not sampled
    versions[t]  the weights that sampled token t, or that first read it where it was given
    routes[t]    the experts that each layer used when token t was the INPUT; N - 1 rows, because
                 nothing was computed from the last token
    recorded[t]  whether routes[t] is known; where it is not, its ids mean nothing

Shifting to next-token form happens once, in data/packing. Knows nothing of batches or of text.
"""

import collections
import dataclasses
import enum
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from t1jax.errors import UserError
from t1jax.trajectory import routes

# What rounding can put above a probability of 1.
LOGPROB_ROUNDING = 1e-3


class Rule(enum.Enum):
    """How a turn's prompt met the stream before it; `boundary` decides. In order of damage."""

    opening = "opening"  # the first prompt: there was no stream
    strict = "strict"
    normalised = "normalised"
    retokenised = "retokenised"
    split = "split"


class Finish(enum.StrEnum):
    """Why a completion ended."""

    stop = "stop"  # an end token, which is the completion's last
    length = "length"
    cancelled = "cancelled"


class LogprobKind(enum.StrEnum):
    """Of which distribution `logprobs` are. Only raw ones can be compared with a trainer's."""

    raw = "raw"  # softmax of logits / temperature, over the whole vocabulary
    filtered = "filtered"  # renormalised over what top-k and top-p left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the policy's tokens were drawn; the trainer's log-probs need the same temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"sampling.temperature is {self.temperature}; expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling.top_p is {self.top_p}; expected above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"sampling.top_k is {self.top_k}; expected 0 (off) or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteShape:
    """Layers, chosen experts per token, experts. All zero for a model without experts."""

    layers: int
    chosen: int
    experts: int

    def __post_init__(self) -> None:
        if min(self.layers, self.chosen, self.experts) < 0 or self.chosen > self.experts:
            raise UserError(
                f"routes of {self.layers} layers with {self.chosen} of {self.experts} experts "
                "cannot be; expected no negative number and at most as many chosen as there are"
            )

    @property
    def dtype(self) -> np.dtype:
        return routes.dtype_for(self.experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One request to the policy: tokens begin..sampled-1 were given, sampled..end-1 answered."""

    begin: int
    sampled: int
    end: int
    rule: Rule
    finish: Finish


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """One append-only stream of N tokens. See the module for what its columns mean.

    Arrays become read-only views. A trial has several chunks only where its history was rewritten.
    """

    ids: np.ndarray  # [N] int32
    mask: np.ndarray  # [N] bool
    logprobs: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int32
    routes: np.ndarray  # [N-1, L, C], smallest unsigned type
    recorded: np.ndarray  # [N-1] bool
    turns: tuple[Turn, ...]
    shape: RouteShape
    sampling: Sampling
    logprob_kind: LogprobKind

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_turns(self)
        _check_logprobs(self)
        _check_versions(self)
        routes.check(self.routes, self.recorded, self.shape.experts)
        for name in COLUMNS:
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def sampled_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def missing_rows(self) -> int:
        """Rows whose routes are unknown, the last token's not counted."""
        return int((~self.recorded).sum())

    def raw_logprobs(self) -> np.ndarray:
        """The sampler's log-probs where they can be compared with a trainer's, else a refusal."""
        if self.logprob_kind is not LogprobKind.raw:
            raise UserError(
                f"logprobs of this trajectory are {self.logprob_kind} (top_p "
                f"{self.sampling.top_p}, top_k {self.sampling.top_k}); training compares raw ones: "
                "record those of the full softmax"
            )
        return self.logprobs

    def truncated(self, length: int) -> "Chunk":
        """The first `length` tokens; columns stay where they were, cut turns end by length."""
        if not 0 < length <= len(self):
            raise UserError(f"cannot cut {len(self)} tokens to {length}; expected 1..{len(self)}")
        if length == len(self):
            return self
        turns = [
            dataclasses.replace(t, end=length, finish=Finish.length) if t.end > length else t
            for t in self.turns
            if t.sampled < length
        ]
        cut = {name: getattr(self, name)[: rows_of(name, length)] for name in COLUMNS}
        return dataclasses.replace(self, turns=tuple(turns), **cut)


COLUMNS = ("ids", "mask", "logprobs", "versions", "routes", "recorded")


def rows_of(column: str, tokens: int) -> int:
    """How many rows a column of a stream of so many tokens has."""
    return max(tokens - 1, 0) if column in ("routes", "recorded") else tokens


def _check_columns(chunk: Chunk) -> None:
    N, shape = len(chunk.ids), chunk.shape
    wanted = {
        "ids": ((N,), np.dtype(np.int32)),
        "mask": ((N,), np.dtype(bool)),
        "logprobs": ((N,), np.dtype(np.float32)),
        "versions": ((N,), np.dtype(np.int32)),
        "routes": ((max(N - 1, 0), shape.layers, shape.chosen), shape.dtype),
        "recorded": ((max(N - 1, 0),), np.dtype(bool)),
    }
    if N == 0:
        raise UserError("trajectory of 0 tokens; expected at least a prompt")
    for name, (size, dtype) in wanted.items():
        column = getattr(chunk, name)
        if column.shape != size or column.dtype != dtype:
            raise UserError(
                f"trajectory of {N} tokens has {name} of shape {list(column.shape)}, "
                f"{column.dtype}; expected {list(size)}, {dtype}"
            )
    if (chunk.ids < 0).any():
        token = int(np.argmax(chunk.ids < 0))
        raise UserError(f"trajectory: token {token} has id {chunk.ids[token]}; expected 0 or more")


def _check_turns(chunk: Chunk) -> None:
    inside = np.zeros(len(chunk), bool)
    before = 0
    for number, turn in enumerate(chunk.turns):
        if not before <= turn.begin <= turn.sampled <= turn.end <= len(chunk):
            raise UserError(
                f"trajectory: turn {number} covers {turn.begin}..{turn.sampled}..{turn.end}; "
                f"expected rising positions from {before} to {len(chunk)}"
            )
        inside[turn.sampled : turn.end] = True
        before = turn.end
    stray = chunk.mask & ~inside
    if stray.any():
        raise UserError(
            f"trajectory: token {int(np.argmax(stray))} is marked as sampled and lies in no "
            "turn's completion"
        )


def _check_logprobs(chunk: Chunk) -> None:
    sampled = chunk.mask
    valid = np.where(sampled, chunk.logprobs <= LOGPROB_ROUNDING, chunk.logprobs == 0)
    bad = ~(valid & np.isfinite(chunk.logprobs))
    if bad.any():
        token = int(np.argmax(bad))
        raise UserError(
            f"trajectory: token {token} ({'sampled' if sampled[token] else 'not sampled'}) has "
            f"log-prob {chunk.logprobs[token]}; expected "
            f"{'a finite number of at most 0' if sampled[token] else '0'}"
        )


def _check_versions(chunk: Chunk) -> None:
    bad = np.diff(chunk.versions, prepend=np.int32(0)) < 0
    if bad.any():
        token = int(np.argmax(bad))
        raise UserError(
            f"trajectory: token {token} was sampled by weight version {chunk.versions[token]}, "
            "older than the one before; expected versions from 0 that never fall"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How the trial of a trajectory ended."""

    task: str
    outcome: str  # sandbox.verify.Outcome's names
    reward: float | None  # None: not graded (an infrastructure fault is no reward of 0)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds per stage
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # anything JSON holds

    def __post_init__(self) -> None:
        if not self.outcome:
            raise UserError(f"trajectory of task {self.task!r} has no outcome; expected its name")
        if self.reward is not None and not math.isfinite(self.reward):
            raise UserError(
                f"trajectory of task {self.task!r} has reward {self.reward}; expected a finite "
                "number, or none where the trial was not graded"
            )
        for name in ("timings", "details"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        try:  # now, and not when the episode is over and to be saved
            json.dumps([self.timings, self.details], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"trajectory of task {self.task!r} has timings or details that JSON cannot hold: "
                f"{error}"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One episode: its chunks in order (nearly always one), and how it ended."""

    chunks: tuple[Chunk, ...]
    ending: Ending

    def __post_init__(self) -> None:
        if not self.chunks:
            raise UserError(f"trajectory of task {self.ending.task!r} has no chunk")

    @property
    def reward(self) -> float | None:
        """The trial's; every chunk gets it, on its last sampled token."""
        return self.ending.reward

    @property
    def turns(self) -> int:
        return sum(len(chunk.turns) for chunk in self.chunks)

    @property
    def boundaries(self) -> dict[str, int]:
        """How often each rule joined a turn to what came before. Opening prompts are none."""
        counts = collections.Counter(t.rule for chunk in self.chunks for t in chunk.turns)
        return {rule.value: counts[rule] for rule in Rule if rule is not Rule.opening}

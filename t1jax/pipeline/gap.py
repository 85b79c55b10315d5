"""The log-prob gap of recorded chunks: scored as training scores, and what of it is which cause.

d = log-prob of the trainer - of the sampler, of one sampled token; a stretch that came back under
other ids (`trajectory/retokenise`) is compared once, by the sums over its tokens, and counts as the
sampled tokens that it stands for. Intervals are a bootstrap over trajectories, the same draws for
every number, so that differences are paired.

Knows nothing of files. Not covered: several hosts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from t1jax.data.packing import MicroBatch, Piece, arrange, fill, pack_rows, padded
from t1jax.model.qwen3_5 import Params
from t1jax.model.sharding import axis_size
from t1jax.pipeline.learning import Setup
from t1jax.pipeline.place import Placer, fetched
from t1jax.rl import mismatch, steps
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import Chunk
from t1jax.trajectory.retokenise import retokenise

DRAWS = 2000  # of the bootstrap
UNIT = 64  # rows have a multiple of so many columns


class Stream(NamedTuple):
    """A chunk to be scored, and what stands for each of the tokens that were sampled."""

    trajectory: int
    piece: Piece
    stands_for: np.ndarray  # [N]: see `Retokenised`
    changed: int = 0
    lost: int = 0


def recorded(pieces: Sequence[Piece]) -> list[Stream]:
    """Streams as they were sampled."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(piece.name for piece in pieces))}
    return [Stream(numbers[p.name], p, p.chunk.mask.astype(np.int32)) for p in pieces]


def encoded_again(streams: Sequence[Stream], chat: Chat) -> list[Stream]:
    """The same streams, their text encoded again."""

    def again(stream: Stream) -> Stream:
        new = retokenise(stream.piece.chunk, chat)
        piece = stream.piece._replace(chunk=new.chunk)
        return Stream(stream.trajectory, piece, new.stands_for, new.changed, new.lost)

    return [again(stream) for stream in streams]


class Scores(NamedTuple):
    """Log-probs of each stream's tokens 1..N-1, and (token, layer) rows replayed and replaced."""

    logprobs: list[np.ndarray]
    rows: int
    replaced: int


class Scorer:
    """Training's log-prob pass over streams. Compiles one program a shape and kind of routing."""

    def __init__(self, setup: Setup, batch_tokens: int):
        self._setup, self._batch_tokens = setup, batch_tokens
        self._program = steps.make_policy_logprobs(setup.policy, setup.run)

    def __call__(self, params: Params, streams: Sequence[Stream], *, replay: bool) -> Scores:
        """Scores every stream under `params`."""
        pieces = [stream.piece for stream in streams]
        batches = self._arranged([len(piece.chunk) for piece in pieces])
        placer = Placer(self._setup.run, len(batches[0].rows))
        experts = self._setup.policy.config.moe.experts
        logprobs: dict[int, np.ndarray] = {}
        rows = replaced = 0
        for micro in batches:
            packed = fill(micro, pieces, self._setup.shape)
            routes = placer.routes(packed, experts) if replay else None
            scored = fetched(self._program(params, placer.batch(packed), routes))
            logprobs |= _unpacked(micro, pieces, scored.logprobs_BT)
            if replay:
                rows, replaced = rows + scored.recorded_L.sum(), replaced + scored.replaced_L.sum()
        return Scores([logprobs[n] for n in range(len(pieces))], int(rows), int(replaced))

    def _arranged(self, lengths: Sequence[int]) -> tuple[MicroBatch, ...]:
        """Packed rows as long as the longest stream, as many in a pass as the tokens allow."""
        parts = axis_size(self._setup.run.mesh, "rows")
        unit = UNIT * axis_size(self._setup.run.mesh, "positions")
        columns = padded(max(lengths), unit)
        needed = -(-len(pack_rows(lengths, columns)) // parts)
        rows = min(max(self._batch_tokens // columns // parts, 1), needed) * parts
        return arrange(lengths, tokens=columns, rows=rows, packed=True)


def _unpacked(
    micro: MicroBatch, pieces: Sequence[Piece], logprobs_BT: np.ndarray
) -> dict[int, np.ndarray]:
    found = {}
    for b, row in enumerate(micro.rows):
        column = 0
        for number in row:
            length = len(pieces[number].chunk)
            found[number] = logprobs_BT[b, column : column + length - 1]
            column += length
    return found


# ---- the gap ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gap:
    """Two log-probs of each token or stretch, the sampled tokens that it is, and whose it is."""

    train: np.ndarray
    other: np.ndarray  # the sampler's, or the trainer's under other weights
    tokens: np.ndarray
    trajectory: np.ndarray

    def means(self, weights: np.ndarray) -> np.ndarray:
        """sum |d| / sampled tokens, under each row of how often a trajectory counts."""
        size = weights.shape[1]
        total = np.bincount(self.trajectory, np.abs(self.train - self.other), size)
        count = np.bincount(self.trajectory, self.tokens, size)
        means: np.ndarray = (weights @ total) / np.maximum(weights @ count, 1)
        return means


def against_sampler(streams: Sequence[Stream], logprobs: Sequence[np.ndarray]) -> Gap:
    """The trainer's log-probs against those that were recorded."""
    return _gap(streams, logprobs, [stream.piece.chunk.logprobs[1:] for stream in streams])


def between(
    streams: Sequence[Stream], after: Sequence[np.ndarray], before: Sequence[np.ndarray]
) -> Gap:
    """The trainer's log-probs under other weights: how far an update moved."""
    return _gap(streams, after, before)


def _gap(
    streams: Sequence[Stream], train: Sequence[np.ndarray], other: Sequence[np.ndarray]
) -> Gap:
    parts: list[tuple[np.ndarray, ...]] = [(np.zeros(0),) * 2 + (np.zeros(0, np.int64),) * 2]
    for stream, a, b in zip(streams, train, other, strict=True):
        chunk: Chunk = stream.piece.chunk
        sampled = chunk.mask[1:]
        tokens = stream.stands_for[1:][sampled]
        begins = np.flatnonzero(tokens)
        if len(begins):
            sums = [np.add.reduceat(x[sampled].astype(np.float64), begins) for x in (a, b)]
            whose = np.full(len(begins), stream.trajectory)
            parts.append((*sums, tokens[begins], whose))
    names = ("train", "other", "tokens", "trajectory")
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Gap(**dict(zip(names, columns, strict=True)))


def draws(trajectories: int, seed: int) -> np.ndarray:
    """How often each trajectory is drawn; the first row is the sample itself."""
    random = np.random.default_rng(seed)
    drawn = random.multinomial(trajectories, np.full(trajectories, 1 / trajectories), DRAWS)
    return np.concatenate([np.ones((1, trajectories), drawn.dtype), drawn])


def estimate(means: np.ndarray) -> dict[str, object]:
    """A number and its 95% interval, of the sample and its draws."""
    low, high = np.percentile(means[1:], (2.5, 97.5)).tolist()
    return {"abs_diff": float(means[0]), "ci95": [low, high]}


def metrics(gap: Gap) -> dict[str, float | None]:
    """Every number of `rl/mismatch` over what is compared, None: beyond float32."""
    compute: Callable[..., dict[str, jax.Array]] = jax.jit(mismatch.metrics)
    told = compute(
        gap.train.astype(np.float32), gap.other.astype(np.float32), np.ones(len(gap.train), bool)
    )
    finite = {name: float(value) for name, value in fetched(told).items()}
    return {name: x if math.isfinite(x) else None for name, x in finite.items()}

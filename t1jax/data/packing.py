"""Chunks of trajectories become rows of fixed length: THE shift to next-token form is here.

A record's column t describes token t. A batch's column t has token t as input and is otherwise
about token t + 1, its target (t1jax/rl/inputs.Batch says the same from the device's side):

    record    ids[t]  routes[t]            batch column t    tokens  ids    (routes of the input)
              ids[t+1] mask[t+1] logprobs[t+1]               targets mask sampler_logprobs versions

The last token has no target and no recorded route. Two steps: `arrange` decides from lengths alone
which chunk stands in which row, alike in every process; `fill` copies the rows that a process
needs. Numpy only; knows nothing of devices, files or text.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from t1jax.errors import UserError
from t1jax.trajectory.record import Chunk, RouteShape, Trajectory
from t1jax.trajectory.routes import plan_dispatch


class Piece(NamedTuple):
    """One chunk, and what its trial earned."""

    name: str  # of the trajectory, for messages
    chunk: Chunk
    reward: float


class MicroBatch(NamedTuple):
    """Which pieces stand in each row of one pass; rows without a piece are padding."""

    rows: tuple[tuple[int, ...], ...]
    columns: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Rows of a micro-batch in numpy. See the module for the columns."""

    tokens_BT: np.ndarray  # int32
    targets_BT: np.ndarray  # int32
    positions_BT: np.ndarray  # int32
    segments_BT: np.ndarray  # int32: pieces of a row are 1, 2, ...; 0 is padding
    mask_BT: np.ndarray  # bool: the policy sampled the target
    sampler_logprobs_BT: np.ndarray  # float32, 0 where not sampled
    rewards_BT: np.ndarray  # float32, at each piece's last sampled target
    versions_BT: np.ndarray  # int32: the weights that sampled the target
    # Smallest unsigned type, as recorded: widened in the router alone. Rows that mean nothing hold
    # C distinct ids all the same, so that a dispatch plan can be made of them.
    ids_LBTC: np.ndarray
    recorded_BT: np.ndarray  # bool: the input's routes are known

    @property
    def complete(self) -> bool:
        """Whether every route that can matter is known: all but those of last tokens."""
        inputs_BT = (self.segments_BT > 0) & ~last_columns(self.segments_BT)
        return bool((self.recorded_BT | ~inputs_BT).all())


def last_columns(segments_BT: np.ndarray) -> np.ndarray:
    """True at the last token of each piece."""
    after_BT = np.pad(segments_BT, ((0, 0), (0, 1)))[:, 1:]
    return (segments_BT > 0) & (segments_BT != after_BT)


# ---- which row ----------------------------------------------------------------------------------


def arrange(
    lengths: Sequence[int], *, tokens: int, rows: int, packed: bool, unit: int = 64
) -> tuple[MicroBatch, ...]:
    """Places pieces in rows of at most `tokens` columns, and rows in micro-batches of `rows`.

    Packed rows all have `tokens` columns, so that there is one program. One piece a row: pieces of
    like length stand together, and columns are the longest rounded up to one of 8 sizes per
    doubling.
    """
    members = pack_rows(lengths, tokens) if packed else _one_each(lengths)
    groups = [members[i : i + rows] for i in range(0, len(members), rows)]
    batches = []
    for group in groups:
        longest = max(sum(lengths[piece] for piece in row) for row in group)
        columns = tokens if packed else min(padded(longest, unit), tokens)
        padding = [()] * (rows - len(group))
        batches.append(MicroBatch((*map(tuple, group), *padding), columns))
    return tuple(batches)


def pack_rows(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still holds it."""
    order = sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece))
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (columns left, row), sorted
    for piece in order:
        length = lengths[piece]
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            left, row = tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(piece)
        bisect.insort(room, (left - length, row))
    return rows


def _one_each(lengths: Sequence[int]) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece))
    return [[piece] for piece in order]


def padded(length: int, unit: int) -> int:
    """`length` rounded up to one of 8 sizes per doubling, all multiples of `unit`."""
    units = -(-length // unit)
    step = 2 ** max(math.ceil(math.log2(units)) - 4, 0)
    return -(-units // step) * step * unit


def efficiency(batches: Iterable[MicroBatch], lengths: Sequence[int]) -> float:
    """The share of columns that hold a token."""
    batches = list(batches)
    columns = sum(len(batch.rows) * batch.columns for batch in batches)
    return sum(lengths) / columns


# ---- which chunks -------------------------------------------------------------------------------


def pieces_of(
    trajectories: Iterable[tuple[str, Trajectory]], *, tokens: int, too_long: str
) -> tuple[list[Piece], dict[str, int]]:
    """Every chunk that a step can learn from, and how many were left out and why.

    Args:
      trajectories: names and graded trajectories.
      tokens: columns of a row.
      too_long: `error`, or `leave_out` what is longer than a row.

    Raises:
      UserError: a trajectory is not graded, or a chunk is longer than a row.
    """
    pieces, counts = [], {"too_long": 0, "nothing_sampled": 0}
    for name, trajectory in trajectories:
        if trajectory.reward is None:
            raise UserError(
                f"trajectory {name} ended as {trajectory.ending.outcome} and has no reward; "
                "training takes graded ones only: leave it out"
            )
        for number, chunk in enumerate(trajectory.chunks):
            reason = _unfit(f"{name}, chunk {number}", chunk, tokens, too_long)
            if reason:
                counts[reason] += 1
            else:
                pieces.append(Piece(name, chunk, float(trajectory.reward)))
    return pieces, counts


def _unfit(name: str, chunk: Chunk, tokens: int, too_long: str) -> str:
    if chunk.mask[0]:
        raise UserError(
            f"trajectory {name} begins with a sampled token, whose log-prob nothing gives; "
            "expected a prompt of one token or more"
        )
    if chunk.sampled_tokens == 0:
        return "nothing_sampled"
    if len(chunk) <= tokens:
        return ""
    if too_long == "leave_out":
        return "too_long"
    raise UserError(
        f"trajectory {name} has {len(chunk)} tokens and a row holds {tokens}; raise batch.tokens, "
        "or set batch.too_long=leave_out to train without such chunks"
    )


# ---- the arrays ---------------------------------------------------------------------------------


def fill(
    batch: MicroBatch,
    pieces: Mapping[int, Piece] | Sequence[Piece],
    shape: RouteShape,
    rows: slice = slice(None),
) -> Packed:
    """Copies the pieces of some rows (all of them if not given) into arrays.

    Args:
      batch: which piece stands where.
      pieces: by number; only those of the rows are looked at.
      shape: of the model's routes; NO_ROUTES leaves them out.
      rows: those that this process needs.

    Raises:
      UserError: a piece has routes of another model.
    """
    mine = batch.rows[rows]
    B, T = len(mine), batch.columns
    ints = {f: np.zeros((B, T), np.int32) for f in INTS}
    floats = {f: np.zeros((B, T), np.float32) for f in FLOATS}
    bools = {f: np.zeros((B, T), bool) for f in BOOLS}
    arrays = {**ints, **floats, **bools, "ids_LBTC": _blank_routes(B, T, shape)}
    for b, row in enumerate(mine):
        column = 0
        for segment, number in enumerate(row, start=1):
            _place(arrays, pieces[number], slice(column, column + len(pieces[number].chunk)), b)
            arrays["segments_BT"][b, column : column + len(pieces[number].chunk)] = segment
            if shape is not NO_ROUTES:
                _place_routes(arrays, pieces[number], shape, column, b)
            column += len(pieces[number].chunk)
    return Packed(**arrays)


NO_ROUTES = RouteShape(layers=0, chosen=0, experts=0)
INTS = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "versions_BT")
FLOATS = ("sampler_logprobs_BT", "rewards_BT")
BOOLS = ("mask_BT", "recorded_BT")


def _place(arrays: dict[str, np.ndarray], piece: Piece, inputs: slice, b: int) -> None:
    chunk, told = piece.chunk, slice(inputs.start, inputs.stop - 1)
    arrays["tokens_BT"][b, inputs] = chunk.ids
    arrays["positions_BT"][b, inputs] = np.arange(len(chunk))
    # Everything about the target: one column to the left of its token.
    arrays["targets_BT"][b, told] = chunk.ids[1:]
    arrays["mask_BT"][b, told] = chunk.mask[1:]
    arrays["sampler_logprobs_BT"][b, told] = chunk.logprobs[1:]
    arrays["versions_BT"][b, told] = chunk.versions[1:]
    sampled = np.flatnonzero(chunk.mask)
    if len(sampled):
        arrays["rewards_BT"][b, inputs.start + int(sampled[-1]) - 1] = piece.reward


def _place_routes(
    arrays: dict[str, np.ndarray], piece: Piece, shape: RouteShape, column: int, b: int
) -> None:
    """Routes are the input's, so they stay in its column. The last token's are not known."""
    chunk = piece.chunk
    if chunk.shape != shape:
        raise UserError(
            f"trajectory {piece.name} has routes of {chunk.shape.layers} layers with "
            f"{chunk.shape.chosen} of {chunk.shape.experts} experts; the model has {shape.layers} "
            f"layers with {shape.chosen} of {shape.experts}: another model recorded it"
        )
    told, known = slice(column, column + len(chunk) - 1), chunk.recorded
    arrays["recorded_BT"][b, told] = known
    routes_LTC = np.moveaxis(chunk.routes, 1, 0)
    if known.all():
        arrays["ids_LBTC"][:, b, told] = routes_LTC
    else:
        arrays["ids_LBTC"][:, b, told][:, known] = routes_LTC[:, known]


def _blank_routes(B: int, T: int, shape: RouteShape) -> np.ndarray:
    """Rows of C distinct ids, turned from column to column: no expert gets them all."""
    ids_LBTC = np.empty((shape.layers, B, T, shape.chosen), shape.dtype)
    turned_TC = np.arange(T)[:, None] * shape.chosen + np.arange(shape.chosen)
    ids_LBTC[:] = turned_TC % max(shape.experts, 1)
    return ids_LBTC


def plan(packed: Packed, experts: int, layout: Mapping[str, int | str]) -> tuple:
    """The dispatch plan of complete routes: order, sizes and room (see routes.plan_dispatch).

    Args:
      packed: all rows of a micro-batch, with `complete` routes.
      experts: E.
      layout: of the mesh, as t1jax.model.moe.plan_layout says.
    """
    return plan_dispatch(packed.ids_LBTC, packed.segments_BT > 0, experts=experts, **layout)  # type: ignore[arg-type]

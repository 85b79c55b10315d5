"""Rows of like length in batches of equal shape, so that few programs are compiled."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t1jax.model.config import ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.moe import Plan, Replay, plan_layout
from t1jax.model.sharding import RULES, axis_size, spec
from t1jax.score.inputs import Tokens
from t1jax.trajectory.routes import plan_dispatch


class Bucket(NamedTuple):
    """Rows that one program scores, in batches of `rows` rows padded to `size` positions."""

    size: int
    rows: int
    batches: list[np.ndarray]  # numbers of INPUT's rows, at most `rows` each


def padded_length(length: int, unit: int) -> int:
    """`length` rounded up to one of 8 sizes per doubling, all multiples of `unit`."""
    units = -(-length // unit)
    step = 2 ** max(math.ceil(math.log2(units)) - 4, 0)
    return -(-units // step) * step * unit


def arrange(
    lengths: np.ndarray, *, batch_tokens: int, row_parts: int, unit: int
) -> list[Bucket]:
    """Sorts rows into buckets of like length, longest first: memory runs out at once or never.

    Batches of a bucket have equal shapes, so that it is one program; their rows are as few as hold
    the bucket evenly, in multiples of `row_parts`. Rows of length 0 are in no bucket.
    """
    rows_by_length = np.argsort(lengths, kind="stable")
    by_size: dict[int, list[int]] = {}
    for row in rows_by_length[::-1]:
        if lengths[row] > 0:
            by_size.setdefault(padded_length(int(lengths[row]), unit), []).append(int(row))
    buckets = []
    for size, members in by_size.items():
        most = max(batch_tokens // size // row_parts, 1) * row_parts
        count = -(-len(members) // most)
        rows = -(-len(members) // (count * row_parts)) * row_parts
        batches = [np.array(members[i : i + rows]) for i in range(0, len(members), rows)]
        buckets.append(Bucket(size, rows, batches))
    return buckets


class Routes(NamedTuple):
    """Recorded routes of a batch; an id means nothing where `recorded_LBT` is False."""

    ids_LBTC: np.ndarray
    recorded_LBT: np.ndarray


class Batch(NamedTuple):
    """What a pass takes, on the host."""

    members: np.ndarray  # which row of INPUT each row is; fewer than rows where some are padding
    tokens_BT: np.ndarray
    valid_BT: np.ndarray  # int32: 1 for a token, 0 for padding
    routes: Routes | None


def fill(tokens: Tokens, members: np.ndarray, bucket: Bucket, config: ModelConfig) -> Batch:
    """Copies rows of INPUT into padded arrays."""
    B, T = bucket.rows, bucket.size
    tokens_BT, valid_BT = np.zeros((2, B, T), np.int32)
    for i, row in enumerate(members):
        length = int(tokens.lengths[row])
        tokens_BT[i, :length] = tokens.ids[row, :length]
        valid_BT[i, :length] = 1
    routes = None if tokens.routes is None else _fill_routes(tokens, members, bucket, config)
    return Batch(members, tokens_BT, valid_BT, routes)


def _fill_routes(
    tokens: Tokens, members: np.ndarray, bucket: Bucket, config: ModelConfig
) -> Routes:
    shape = (config.layers, bucket.rows, bucket.size)
    recorded_LBT = np.zeros(shape, bool)
    ids_LBTC = np.zeros((*shape, config.moe.chosen), config.route_dtype)
    for i, row in enumerate(members):
        ids_LTC = np.moveaxis(tokens.routes_of(row), 1, 0)
        recorded_LT = (ids_LTC != -1).any(axis=-1)
        length = ids_LTC.shape[1]
        recorded_LBT[:, i, :length] = recorded_LT
        ids_LBTC[:, i, :length] = np.where(recorded_LT[..., None], ids_LTC, 0)
    return Routes(ids_LBTC, recorded_LBT)


class Placed(NamedTuple):
    """A batch on the devices: the arguments of a pass after the parameters."""

    tokens_BT: jax.Array
    valid_BT: jax.Array
    replay: Replay | None
    plans: Plan | None


def placed(
    tokens: Tokens, bucket: Bucket, config: ModelConfig, run: Execution
) -> Iterator[tuple[Batch, Placed]]:
    """The bucket's batches, all of the same shapes: all with a plan, or all with a mask.

    A plan needs every route known, last tokens' included: it leaves no choice to the router.
    """

    def plan(batch: Batch) -> Plan:
        ids_LBTC = batch.routes.ids_LBTC  # type: ignore[union-attr]
        layout = plan_layout(run.mesh, run.dispatch)
        valid_BT = batch.valid_BT > 0
        return Plan(*plan_dispatch(ids_LBTC, valid_BT, experts=config.moe.experts, **layout))

    room = 0
    planned = tokens.routes is not None and _is_complete(tokens, bucket)
    if planned and run.dispatch == "gather":
        # Planning twice costs less than compiling twice, and keeping the plans too much memory.
        room = max(plan(fill(tokens, rows, bucket, config)).room for rows in bucket.batches)
    for members in bucket.batches:
        batch = fill(tokens, members, bucket, config)
        replay = _put_replay(batch.routes, planned, run)
        plans = _put_plan(plan(batch), batch, room, run) if room else None
        tokens_BT = _put(batch.tokens_BT, run, "rows", "positions")
        valid_BT = _put(batch.valid_BT, run, "rows", "positions")
        yield batch, Placed(tokens_BT, valid_BT, replay, plans)


def _is_complete(tokens: Tokens, bucket: Bucket) -> bool:
    rows = (row for members in bucket.batches for row in members)
    return all((tokens.routes_of(row) != -1).all() for row in rows)


def _put(x: np.ndarray, run: Execution, *axes: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(run.mesh, spec(*axes)))


def _put_replay(routes: Routes | None, complete: bool, run: Execution) -> Replay | None:
    if routes is None:
        return None
    axes = (None, "rows", "positions")
    recorded_LBT = None if complete else _put(routes.recorded_LBT, run, *axes)
    return Replay(_put(routes.ids_LBTC, run, *axes, None), recorded_LBT)


def _put_plan(plan: Plan, batch: Batch, room: int, run: Execution) -> Plan:
    """The plan on the devices, its order filled up to `room` rows with no copy in them."""
    _, B, T, C = batch.routes.ids_LBTC.shape  # type: ignore[union-attr]
    groups = axis_size(run.mesh, "rows") // axis_size(run.mesh, "experts")
    no_copy = B // groups * (T // axis_size(run.mesh, "positions")) * C
    extra = room - plan.order_R.shape[-1]
    order_R = np.pad(plan.order_R, ((0, 0), (0, 0), (0, extra)), constant_values=no_copy)
    shards = PartitionSpec(None, (*RULES["rows"], *RULES["positions"]))
    put = lambda x: jax.device_put(x, NamedSharding(run.mesh, shards))  # noqa: E731
    return Plan(put(order_R), put(plan.sizes_E), room)

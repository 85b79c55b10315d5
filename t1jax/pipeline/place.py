"""From a loader's numpy arrays to arrays on the mesh, in one process or several.

Every transfer of a training loop is one of these, and explicit: loops run under
`jax.transfer_guard("disallow")`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from t1jax.data.packing import Packed, plan
from t1jax.errors import UserError
from t1jax.model.execution import Execution
from t1jax.model.moe import Plan, Replay, plan_layout
from t1jax.model.sharding import axis_size, spec
from t1jax.rl.inputs import Batch, Routes, shardings


def rows_of_process(run: Execution, rows: int) -> slice:
    """Which rows of a micro-batch this process needs.

    Raises:
      UserError: the mesh does not divide the rows.
    """
    parts = axis_size(run.mesh, "rows")
    if rows % parts:
        raise UserError(
            f"batch.rows={rows} does not divide over {parts} devices along the rows "
            f"(data x fsdp x expert of the mesh {dict(run.mesh.shape)}); set batch.rows to a "
            f"multiple of {parts}"
        )
    sharding = jax.sharding.NamedSharding(run.mesh, spec("rows"))
    places = sharding.addressable_devices_indices_map((rows,))
    starts = [index[0].indices(rows)[:2] for index in places.values() if index is not None]
    return slice(min(first for first, _ in starts), max(last for _, last in starts))


class Placer:
    """Puts micro-batches of `rows` rows onto the mesh of a run."""

    def __init__(self, run: Execution, rows: int, rooms: Mapping[str, int] | None = None):
        self._run, self._rows = run, rows
        self.mine = rows_of_process(run, rows)
        # Rows that dispatch plans of each shape have been padded to: they only grow, so that few
        # programs are compiled. Part of a run's state, because a restart must run the same ones.
        self.rooms: dict[str, int] = dict(rooms or {})

    def batch(self, packed: Packed) -> Batch:
        """What every step takes."""
        fields = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "mask_BT")
        return self._put(Batch(**{name: getattr(packed, name) for name in fields}))

    def numbers(self, x_BT: np.ndarray) -> jax.Array:
        """Any array of one number a token."""
        array: jax.Array = self._put(x_BT)
        return array

    def routes(self, packed: Packed, experts: int) -> Routes:
        """Recorded routes for replay, with dispatch plans where nothing is missing.

        A plan is made of all rows of a micro-batch, so only a single process has them.
        """
        if packed.complete and jax.process_count() == 1:
            layout = plan_layout(self._run.mesh, self._run.dispatch)
            plans = self._padded(Plan(*plan(packed, experts, layout)), packed)
            routes = Routes(Replay(packed.ids_LBTC, None), plans)  # type: ignore[arg-type]
        else:
            layers = packed.ids_LBTC.shape[0]
            recorded_LBT = np.broadcast_to(
                packed.recorded_BT, (layers, *packed.recorded_BT.shape)
            ).copy()
            routes = Routes(Replay(packed.ids_LBTC, recorded_LBT))  # type: ignore[arg-type]
        placed: Routes = self._put(routes)
        return placed

    def _padded(self, plans: Plan, packed: Packed) -> Plan:
        """The plan with rows that hold no copy, up to the largest room so far."""
        _, B, T, C = packed.ids_LBTC.shape
        name = f"{B}x{T}"
        room = self.rooms[name] = max(self.rooms.get(name, 0), plans.room)
        if self._run.dispatch != "gather" and axis_size(self._run.mesh, "experts") > 1:
            return Plan(plans.order_R, plans.sizes_E, room)
        groups = axis_size(self._run.mesh, "rows") // axis_size(self._run.mesh, "experts")
        no_copy = B // groups * (T // axis_size(self._run.mesh, "positions")) * C
        order_R = np.pad(
            np.asarray(plans.order_R),
            ((0, 0), (0, 0), (0, room - plans.room)),
            constant_values=no_copy,
        )
        return Plan(order_R, plans.sizes_E, room)

    def _put(self, tree: Any) -> Any:
        places = shardings(tree, self._run.mesh)
        if jax.process_count() == 1:
            return jax.device_put(tree, places)
        return jax.tree.map(self._put_rows, tree, places)

    def _put_rows(self, local: np.ndarray, sharding: jax.sharding.NamedSharding) -> jax.Array:
        """An array of which this process holds only its own rows."""
        axis = 0 if local.ndim == 2 else 1
        whole = list(local.shape)
        whole[axis] = self._rows

        def part(index: Any) -> np.ndarray:
            first, last, _ = index[axis].indices(self._rows)
            moved = slice(first - self.mine.start, last - self.mine.start)
            return local[(*index[:axis], moved, *index[axis + 1 :])]

        # Not make_array_from_callback: the transfer guard takes that for an implicit transfer.
        places = sharding.addressable_devices_indices_map(tuple(whole))
        shards = [jax.device_put(part(index), device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(tuple(whole), sharding, shards)


HOST = "pinned_host"


def moved(tree: Any, memory: str) -> Any:
    """Arrays in another memory of their devices, `device` or HOST; those that are there stay."""

    def move(leaf: jax.Array) -> jax.Array:
        if leaf.sharding.memory_kind == memory:
            return leaf
        there: jax.Array = jax.device_put(leaf, leaf.sharding.with_memory_kind(memory))
        return there

    return jax.tree.map(move, tree)


def fetched(tree: Any) -> Any:
    """Small results on the host, as numpy; the same in every process."""
    return jax.device_get(tree)

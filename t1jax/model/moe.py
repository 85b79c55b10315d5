"""Mixture of experts: a router, its replay, and a dispatch that drops no token.

The router picks C experts per token, or is told which (routing replay, arXiv 2510.11370): the ids
are then an argument and only the gates are live. Dispatch is one `shard_map`'d function of
(x, ids, gates, expert weights): each shard works out its own order of routed copies (or is given
it, as a `Plan`), multiplies the copies group by group, and sums them back per token.

| strategy | tokens move by | buffer rows per shard |
|---|---|---|
| gather | all-gather over `expert`, local experts, reduce-scatter back | all gathered copies |
| ragged_all_to_all | each copy goes to its expert's shard and back (TPU) | all gathered copies |

With a Plan (routes known beforehand) the buffer is exactly as large as the fullest shard needs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from t1jax.model.config import ModelConfig
from t1jax.model.exchange import ragged_exchange
from t1jax.model.execution import Execution
from t1jax.model.grouped_matmul import ROW_PADDING, Stack, grouped_matmul
from t1jax.model.layers import StackShape, declare, normal
from t1jax.model.sharding import RULES, axis_size, constrain, per_shard, spec

(EXPERT_AXIS,) = RULES["experts"]
(TENSOR_AXIS,) = RULES["ffn"]


class Replay(NamedTuple):
    """Recorded routes of one layer (or, stacked on a leading axis, of all of them)."""

    ids_BTC: jax.Array  # unsigned, experts each token visits
    recorded_BT: jax.Array | None  # bool: False lets the live router choose; None: all recorded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each routed copy goes, for one layer; one leading entry per shard of the mesh.

    Copy c of the shard's token p has number p * C + c. The tokens are those the shard works on:
    its own, or with the gather strategy those of its whole expert group. An entry of `order_R`
    that stands for no copy holds P * C.
    """

    order_R: jax.Array | np.ndarray  # int32: the copy in each row of the buffer, sorted by expert
    # int32: rows of each expert that the shard sorts by (gather: its own experts)
    sizes_E: jax.Array | np.ndarray
    # Rows that any shard receives at most (ragged_all_to_all); order_R's length says it for gather.
    room: int = dataclasses.field(metadata={"static": True})


def route(
    logits_BTE: jax.Array, chosen: int, replay: Replay | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Picks experts, or is told which; the gate is live either way.

    Args:
      logits_BTE: router logits, any float dtype.
      chosen: experts per token, C.
      replay: recorded ids, or None.

    Returns:
      ids [B, T, C] int32 used; gates [B, T, C] float32, softmax over all experts renormalised over
      the chosen ones (which is softmax over the chosen logits; the logits not chosen get gradient
      0); live ids [B, T, C] that the router alone would choose, best first, lowest id on a tie.
    """
    logits_BTE = logits_BTE.astype(jnp.float32)
    _, live_BTC = jax.lax.top_k(jax.lax.stop_gradient(logits_BTE), chosen)
    if replay is None:
        ids_BTC = live_BTC
    else:
        ids_BTC = replay.ids_BTC.astype(jnp.int32)
        if replay.recorded_BT is not None:
            ids_BTC = jnp.where(replay.recorded_BT[..., None], ids_BTC, live_BTC)
    ids_BTC = checkpoint_name(ids_BTC, "route_ids")
    picked_BTC = jnp.take_along_axis(logits_BTE, ids_BTC, axis=-1)
    return ids_BTC, jax.nn.softmax(picked_BTC, axis=-1), live_BTC


class MoE(nnx.Module):
    """Routed experts plus one shared expert behind its own sigmoid gate."""

    def __init__(self, config: ModelConfig, stack: StackShape):
        m, D = config.moe, config.embed
        self.config = m
        self.router = declare(stack, (D, m.experts), ("embed", None), normal())
        self.gate_up = declare(
            stack, (m.experts, D, 2, m.hidden), ("experts", "embed", None, "ffn"), normal()
        )
        self.down = declare(
            stack, (m.experts, m.hidden, D), ("experts", "ffn", "embed"), normal()
        )
        self.shared_gate_up = declare(
            stack, (D, 2, m.shared_hidden), ("embed", None, "ffn"), normal()
        )
        self.shared_down = declare(stack, (m.shared_hidden, D), ("ffn", "embed"), normal())
        self.shared_gate = declare(stack, (D,), ("embed",), normal())

    def __call__(
        self,
        x_BTD: jax.Array,
        valid_BT: jax.Array,
        replay: Replay | None,
        plan: Plan | None,
        stack: "ExpertStack | None",
        run: Execution,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the layer's output, the ids used and the live router's ids, [B, T, C].

        `stack` is where this layer's experts can be read in place. Padding visits no expert.
        """
        router_dtype = run.router_dtype or x_BTD.dtype
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE", x_BTD.astype(router_dtype), self.router[...].astype(router_dtype),
            precision=run.precision if router_dtype != "float32" else "highest",
        )
        ids_BTC, gates_BTC, live_BTC = route(logits_BTE, self.config.chosen, replay)
        with jax.named_scope("experts"):
            routed_BTD = dispatch(
                x_BTD, ids_BTC, gates_BTC.astype(x_BTD.dtype), valid_BT,
                Experts(self.gate_up[...], self.down[...], stack), plan, run,
            )
        return routed_BTD + self.shared(x_BTD, run), ids_BTC, live_BTC

    def shared(self, x_BTD: jax.Array, run: Execution) -> jax.Array:
        """The shared expert; outside the routing weights."""
        weight = lambda w: w[...].astype(x_BTD.dtype)  # noqa: E731
        product = functools.partial(jnp.einsum, precision=run.precision)
        h_BTUF = product("BTD,DUF->BTUF", x_BTD, weight(self.shared_gate_up))
        act_BTF = jax.nn.silu(h_BTUF[:, :, 0]) * h_BTUF[:, :, 1]
        out_BTD = product("BTF,FD->BTD", act_BTF, weight(self.shared_down))
        open_BT = jax.nn.sigmoid(product("BTD,D->BT", x_BTD, weight(self.shared_gate)))
        return constrain(open_BT[..., None] * out_BTD, run.mesh, "rows", "positions", None)


class Experts(NamedTuple):
    """One layer's expert weights, and (or None) the whole stack of layers that they are from."""

    gate_up_EDUF: jax.Array
    down_EFD: jax.Array
    stack: "ExpertStack | None"


class ExpertStack(NamedTuple):
    """Expert weights of a scan's layers, read in place; `layer` says which are meant."""

    gate_up_LEDUF: jax.Array
    down_LEFD: jax.Array
    layer: jax.Array


def dispatch(
    x_BTD: jax.Array,
    ids_BTC: jax.Array,
    gates_BTC: jax.Array,
    valid_BT: jax.Array,
    experts: Experts,
    plan: Plan | None,
    run: Execution,
) -> jax.Array:
    """sum_c gates[c] * expert[ids[c]](x) for every valid token, over the whole mesh: [B, T, D]."""
    rows, along = spec("rows")[0], spec("positions")[0]
    tokens, places = PartitionSpec(rows, along, None), PartitionSpec(rows, along)
    every_shard = PartitionSpec((*RULES["rows"], *RULES["positions"]))
    # fsdp's split of `embed` is gathered on the way in.
    up = (EXPERT_AXIS, None, None, TENSOR_AXIS)
    down = (EXPERT_AXIS, TENSOR_AXIS, None)
    stack = ExpertStack(PartitionSpec(None, *up), PartitionSpec(None, *down), PartitionSpec())
    weights = Experts(
        PartitionSpec(*up), PartitionSpec(*down), None if experts.stack is None else stack
    )
    strategy = _gathered if run.dispatch == "gather" else _exchanged

    def local(x_BTD, ids_BTC, gates_BTC, valid_BT, experts, plan):
        B, T, D = x_BTD.shape
        E = _local_experts(experts)
        tokens = Tokens(
            x_BTD.reshape(B * T, D),
            # Padding goes to an expert that does not exist: it sorts last and has no row.
            jnp.where(valid_BT[..., None], ids_BTC, E * run.mesh.shape[EXPERT_AXIS]).reshape(
                B * T, -1
            ),
            gates_BTC.reshape(B * T, -1),
        )
        plan = jax.tree.map(lambda leaf: leaf[0], plan)
        return strategy(tokens, experts, plan, run).reshape(B, T, D)

    return per_shard(
        local, run.mesh,
        (tokens, tokens, tokens, places, weights, None if plan is None else every_shard), tokens,
    )(x_BTD, ids_BTC, gates_BTC, valid_BT, experts, plan)


class Tokens(NamedTuple):
    """Flat tokens of a shard with their routes and gates."""

    x_PD: jax.Array
    ids_PC: jax.Array
    gates_PC: jax.Array


def _local_experts(experts: Experts) -> int:
    return experts.down_EFD.shape[0]


def make_plan(ids_PC: jax.Array, first: jax.Array | int, experts: int) -> Plan:
    """The order of copies for experts [first, first + experts), worked out on the device.

    Room for every copy: whatever the router does, none is dropped.
    """
    copies = ids_PC.size
    local_R = ids_PC.reshape(-1) - first
    group_R = jnp.where((local_R >= 0) & (local_R < experts), local_R, experts)
    sorted_R, order_R = jax.lax.sort_key_val(group_R, jnp.arange(copies, dtype=jnp.int32))
    order_R = jnp.where(sorted_R < experts, order_R, copies)
    order_R = jnp.pad(order_R, (0, ROW_PADDING), constant_values=copies)
    ends_E = jnp.searchsorted(sorted_R, jnp.arange(experts), side="right").astype(jnp.int32)
    return Plan(order_R, jnp.diff(ends_E, prepend=0), order_R.shape[0])


def plan_layout(mesh: Mesh, strategy: str) -> dict[str, Any]:
    """What a host-side planner must know of the mesh to lay out Plans for `dispatch`.

    `Plan(*t1jax.trajectory.routes.plan_dispatch(ids, valid, experts=E, **plan_layout(...)))` are
    the Plans of all layers, as numpy leaves.
    """
    shards = mesh.shape[EXPERT_AXIS]
    return {
        "strategy": "gather" if shards == 1 else strategy,  # one shard has nothing to exchange
        "row_padding": ROW_PADDING,
        "expert_shards": shards,
        "context_shards": axis_size(mesh, "positions"),
        "replicas": axis_size(mesh, "rows") // shards,
    }


def _gathered(tokens: Tokens, experts: Experts, plan: Plan | None, run: Execution) -> jax.Array:
    """All tokens of the expert group come here; partial sums go back by reduce-scatter."""
    shards = run.mesh.shape[EXPERT_AXIS]
    if shards > 1:
        tokens = jax.tree.map(
            lambda x: jax.lax.all_gather(x, EXPERT_AXIS, axis=0, tiled=True), tokens
        )
    if plan is None:
        E = _local_experts(experts)
        first = jax.lax.axis_index(EXPERT_AXIS) * E if shards > 1 else 0
        plan = make_plan(tokens.ids_PC, first, E)
    slot_PC = _slots(plan.order_R, tokens.ids_PC.shape)
    x_RD = spread(tokens.x_PD, plan.order_R, slot_PC)
    gates_R = spread_gates(tokens.gates_PC, plan.order_R, slot_PC)
    y_RD = _feed_forward(x_RD, gates_R, experts, plan.sizes_E, run)
    out_PD = collect(y_RD, plan.order_R, slot_PC)
    if shards > 1:
        out_PD = jax.lax.psum_scatter(out_PD, EXPERT_AXIS, scatter_dimension=0, tiled=True)
    return out_PD


def _exchanged(tokens: Tokens, experts: Experts, plan: Plan | None, run: Execution) -> jax.Array:
    """Each copy travels to its expert's shard and back; rows are re-sorted by expert there."""
    shards, E = run.mesh.shape[EXPERT_AXIS], _local_experts(experts)
    if shards == 1:
        return _gathered(tokens, experts, plan, run)
    copies = tokens.ids_PC.size
    room = copies * shards if plan is None else plan.room
    if plan is None:
        plan = make_plan(tokens.ids_PC, 0, E * shards)
    plan = dataclasses.replace(plan, order_R=plan.order_R[:copies])
    slot_PC = _slots(plan.order_R, tokens.ids_PC.shape)
    sent_RD = spread(tokens.x_PD, plan.order_R, slot_PC)
    sent_gates_R = spread_gates(tokens.gates_PC, plan.order_R, slot_PC)
    sizes_SSE = jax.lax.all_gather(plan.sizes_E, EXPERT_AXIS).reshape(shards, shards, E)
    route_out = functools.partial(ragged_exchange, axis=EXPERT_AXIS, platform=_platform(run))
    counts_SS = sizes_SSE.sum(axis=-1)  # [from, to]
    got_RD = route_out(sent_RD, counts_SS, rows=room)
    got_gates_R = route_out(sent_gates_R, counts_SS, rows=room)
    index = jax.lax.axis_index(EXPERT_AXIS)
    here_SE = sizes_SSE[:, index]  # rows from each shard for each expert here
    order_R = _by_expert(here_SE, room)
    slot_R1 = _slots(order_R, (room, 1))
    x_RD = spread(got_RD, order_R, slot_R1)
    gates_R = spread_gates(got_gates_R[:, None], order_R, slot_R1)
    y_RD = _feed_forward(x_RD, gates_R, experts, here_SE.sum(axis=0), run)
    back_RD = collect(y_RD, order_R, slot_R1)
    home_RD = route_out(back_RD, counts_SS.T, rows=copies)
    return collect(home_RD, plan.order_R, slot_PC)


def _platform(run: Execution) -> str:
    return run.mesh.devices.flat[0].platform


def _by_expert(sizes_SE: jax.Array, rows: int) -> jax.Array:
    """Order that turns rows sorted by (source shard, expert) into rows sorted by expert."""
    shards, E = sizes_SE.shape
    expert_R = jnp.repeat(
        jnp.tile(jnp.arange(E), shards), sizes_SE.reshape(-1), total_repeat_length=rows
    )
    row_R = jnp.arange(rows, dtype=jnp.int32)
    expert_R = jnp.where(row_R < sizes_SE.sum(), expert_R, E)
    sorted_R, order_R = jax.lax.sort_key_val(expert_R, row_R)
    order_R = jnp.where(sorted_R < E, order_R, rows)
    return jnp.pad(order_R, (0, ROW_PADDING), constant_values=rows)


def _slots(order_R: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `order_R`: the row of each copy [P, C]; R for a copy without a row here."""
    rows = order_R.shape[0]
    slots = jnp.full(shape[0] * shape[1], rows, jnp.int32)
    return slots.at[order_R].set(jnp.arange(rows, dtype=jnp.int32), mode="drop").reshape(shape)


# Spreading tokens over rows and collecting rows per token are each other's transpose. Written as
# two gathers, neither direction needs a scatter-add (a serial loop on CPU).


@jax.custom_vjp
def spread(x_PD: jax.Array, order_R: jax.Array, slot_PC: jax.Array) -> jax.Array:
    """Row r is the token of copy order[r]; zeros where there is none."""
    return x_PD.at[order_R // slot_PC.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(y_RD: jax.Array, order_R: jax.Array, slot_PC: jax.Array) -> jax.Array:
    """The sum of a token's rows; a copy without a row adds nothing."""
    # One gather per choice, summed as they are read: [P, C, D] is never made.
    return sum(y_RD.at[slot_P].get(mode="fill", fill_value=0) for slot_P in slot_PC.T)


spread.defvjp(
    lambda x, order, slot: (spread(x, order, slot), (order, slot)),
    lambda kept, dy: (collect(dy, *kept), None, None),
)
collect.defvjp(
    lambda y, order, slot: (collect(y, order, slot), (order, slot)),
    lambda kept, dx: (spread(dx, *kept), None, None),
)


@jax.custom_vjp
def spread_gates(gates_PC: jax.Array, order_R: jax.Array, slot_PC: jax.Array) -> jax.Array:
    """Row r is the gate of copy order[r]; 0 where there is none."""
    return gates_PC.reshape(-1).at[order_R].get(mode="fill", fill_value=0)


spread_gates.defvjp(
    lambda gates, order, slot: (spread_gates(gates, order, slot), slot),
    lambda slot, dy: (dy.at[slot].get(mode="fill", fill_value=0), None, None),
)


def _feed_forward(
    x_RD: jax.Array, gates_R: jax.Array, experts: Experts, sizes_E: jax.Array, run: Execution
) -> jax.Array:
    """down(gate * silu(a) * b) with [a | b] = up(x), for rows sorted by expert.

    The gate multiplies the hidden units, not the output: the same product, and the backward pass
    then needs no row of the output.
    """
    gate_up_EDUF, down_EFD, stack = experts
    E, D, U, F = gate_up_EDUF.shape
    up_stack = down_stack = None
    if stack is not None:
        up_stack = Stack(stack.gate_up_LEDUF.reshape(-1, D, U * F), stack.layer * E)
        down_stack = Stack(stack.down_LEFD.reshape(-1, F, D), stack.layer * E)
    product = functools.partial(grouped_matmul, sizes_E=sizes_E, backend=run.grouped_matmul)
    h_RF = product(x_RD, gate_up_EDUF.reshape(E, D, U * F), stack=up_stack)
    h_RF = checkpoint_name(h_RF, "gate_up")
    act_RF = jax.nn.silu(h_RF[:, :F]) * h_RF[:, F:] * gates_R[:, None]
    y_RD = product(act_RF, down_EFD, stack=down_stack)
    if run.mesh.shape[TENSOR_AXIS] > 1:
        y_RD = jax.lax.psum(y_RD, TENSOR_AXIS)
    return y_RD

"""Qwen3.5-MoE: from tokens to hidden states, read top to bottom.

    x = embed[tokens]
    for each layer:  x += mixer(norm(x));  x += moe(norm(x))      # 3 delta-net layers, 1 attention
    hidden = norm(x);  logits = hidden @ lm_head

The module tree is abstract: it declares parameters and holds none. A call binds a parameter tree
(plain nested dicts of arrays) and is pure: cache, recurrent state and routes are arguments and
results. Layers repeat in groups, and the groups run under one `lax.scan`, so that 48 layers compile
as fast as 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t1jax.model.attention import Attention, Placed
from t1jax.model.cache import Cache
from t1jax.model.config import ModelConfig
from t1jax.model.delta_net import DeltaNet, Spans
from t1jax.model.execution import Execution
from t1jax.model.heads import HEADS
from t1jax.model.layers import RMSNorm, declare, normal
from t1jax.model.moe import ExpertStack, MoE, Plan, Replay
from t1jax.model.remat import rematerialise
from t1jax.model.sharding import check_divides, constrain, param_sharding

Params = dict[str, Any]  # nested dicts of arrays, as the module tree names them


class Output(NamedTuple):
    """Results of one pass. What a caller does not return from its jitted function costs nothing."""

    hidden_BTD: jax.Array  # after the final norm
    routes_LBTC: jax.Array  # experts used, smallest unsigned dtype
    live_routes_LBTC: jax.Array  # experts the router alone would have used
    cache: Cache | None
    layers_LBTD: jax.Array | None  # each layer's output, when asked for


class Layer(nnx.Module):
    """One residual layer: a mixer, then the experts."""

    def __init__(self, config: ModelConfig, kind: str, stack: tuple[int, ...]):
        self.kind = kind
        self.mixer_norm = RMSNorm(config.embed, "embed", config.rms_eps, stack)
        self.mixer = (Attention if kind == "attention" else DeltaNet)(config, stack)
        self.moe_norm = RMSNorm(config.embed, "embed", config.rms_eps, stack)
        self.moe = MoE(config, stack)

    def __call__(self, x_BTD, tokens: "Placement", past, replay, plan, group, experts, run):
        """`past` is this layer's cache (a whole stack, of which `group` is meant) or None."""
        with jax.named_scope(self.kind):
            normed_BTD = self.mixer_norm(x_BTD)
            if self.kind == "attention":
                cached = None if past is None else (past, group)
                mixed_BTD, past = self.mixer(
                    normed_BTD, tokens.positions_BT, tokens.placed, cached, run
                )
            else:
                mine = jax.tree.map(lambda stack: stack[group], past)
                mixed_BTD, mine = self.mixer(normed_BTD, tokens.spans, mine, run)
                past = jax.tree.map(lambda stack, new: stack.at[group].set(new), past, mine)
            x_BTD = x_BTD + checkpoint_name(mixed_BTD, "mixer_out")
        with jax.named_scope("moe"):
            out_BTD, ids_BTC, live_BTC = self.moe(
                self.moe_norm(x_BTD), tokens.spans.valid_BT, replay, plan, experts, run
            )
        return x_BTD + out_BTD, past, ids_BTC, live_BTC


class Placement(NamedTuple):
    """Where the tokens of a call stand."""

    positions_BT: jax.Array  # rotary positions
    placed: Placed
    spans: Spans


class Group(nnx.Module):
    """The repeated group of layers, every parameter stacked over the groups."""

    def __init__(self, config: ModelConfig):
        stack = (config.groups,)
        for i, kind in enumerate(config.pattern):
            setattr(self, f"layer_{i}", Layer(config, kind, stack))


class Qwen3_5(nnx.Module):  # noqa: N801
    """The text model with a language-model head ("lm") or a critic's value head ("value")."""

    def __init__(self, config: ModelConfig, head: str = "lm"):
        self.config = config
        self.embed = declare((), (config.vocab, config.embed), ("vocab", "embed"), normal())
        self.groups = Group(config)
        self.final_norm = RMSNorm(config.embed, "embed", config.rms_eps)
        self.head = HEADS[head](config)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        run: Execution,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Cache | None = None,
        replay: Replay | None = None,
        plans: Plan | None = None,
        with_layers: bool = False,
    ) -> Output:
        """Runs the backbone.

        Args:
          tokens_BT: int32 token ids.
          run: mesh, dtype and kernels.
          segments_BT: int32 packing: ids of 1 and more that do not fall along a row, 0 for padding.
            None: every token is real, one segment a row. With a cache a row is one segment, and its
            real tokens come first.
          positions_BT: int32 rotary positions; by default they count from each segment's start, or
            on from the cache.
          cache: the past of each row, or None.
          replay: routes [L, B, T, C] to force, or None to route live.
          plans: dispatch plans for those routes, stacked over layers, or None to work them out.
          with_layers: also return every layer's output.
        """
        check_divides(run.mesh, "tokens", tokens_BT.shape, ("rows", "positions"))
        tokens = _place(tokens_BT, segments_BT, positions_BT, cache)
        x_BTD = self.embed[...].astype(run.dtype)[tokens_BT]
        x_BTD = constrain(x_BTD, run.mesh, "rows", "positions", None)
        x_BTD, layers, routes, seen_LBTD = self._run_groups(
            x_BTD, tokens, cache, replay, plans, with_layers, run
        )
        if cache is not None:
            count_B = tokens.spans.valid_BT.sum(axis=1, dtype=jnp.int32)
            cache = Cache(layers, cache.length_B + count_B)
        with jax.named_scope("final_norm"):
            hidden_BTD = self.final_norm(x_BTD)
        return Output(hidden_BTD, *routes, cache, seen_LBTD)

    def _run_groups(self, x_BTD, tokens, cache, replay, plans, with_layers, run):
        """The scan over groups of layers; layer l is number l % n of group l // n."""
        config, n = self.config, len(self.config.pattern)
        graph, weights = nnx.split(self.groups)
        grouped = jax.tree.map(
            lambda x: x.reshape(config.groups, n, *x.shape[1:]), (replay, plans)
        )

        def group_step(carry, xs):
            x_BTD, past = carry
            group, weights, (replay, plans) = xs
            layers = nnx.merge(graph, weights)
            past, used, seen = list(past), [], []
            for i in range(n):
                layer = getattr(layers, f"layer_{i}")
                experts = self._experts_in_place(f"layer_{i}", group, run)
                step = functools.partial(layer, experts=experts, run=run)
                mine = jax.tree.map(lambda x, i=i: x[i], (replay, plans))
                x_BTD, past[i], *ids = rematerialise(step, run.remat)(
                    x_BTD, tokens, past[i], *mine, group
                )
                used.append([x.astype(config.route_dtype) for x in ids])
                seen.append(x_BTD)
            routes = jax.tree.map(lambda *x: jnp.stack(x), *used)
            return (x_BTD, tuple(past)), (routes, jnp.stack(seen) if with_layers else None)

        past = (None,) * n if cache is None else cache.layers
        (x_BTD, past), stacked = jax.lax.scan(
            group_step, (x_BTD, past), (jnp.arange(config.groups), weights, grouped)
        )
        routes, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
        return x_BTD, past, routes, seen

    def _experts_in_place(self, layer: str, group: jax.Array, run: Execution):
        """The whole stacks of expert weights, where the back end can read a layer's in place.

        Copying one layer's experts out of the stack took 15% of a forward pass on CPU, and more
        than half of a decoding step. With fsdp a layer is gathered whole, so a stack is no use.
        """
        if run.grouped_matmul != "blocked" or run.mesh.shape["fsdp"] > 1:
            return None
        moe = getattr(self.groups, layer).moe
        stacks = jax.lax.stop_gradient((moe.gate_up[...], moe.down[...]))
        return ExpertStack(*stacks, group)


def _place(tokens_BT, segments_BT, positions_BT, cache) -> Placement:
    B, T = tokens_BT.shape
    if segments_BT is None:
        segments_BT = jnp.ones((B, T), jnp.int32)
    spans = Spans.of(segments_BT, continues=cache is not None)
    column_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if cache is not None:
        column_BT = column_BT + cache.length_B[:, None]
        starts_BT = jnp.zeros_like(column_BT)
    else:
        is_start_BT = spans.segment_BT != spans.before_BT
        starts_BT = jax.lax.cummax(jnp.where(is_start_BT, column_BT, 0), axis=1)
    if positions_BT is None:
        positions_BT = column_BT - starts_BT
    placed = Placed(column_BT, segments_BT)
    if cache is not None:
        placed = Placed(column_BT, (segments_BT > 0).astype(jnp.int32))
    return Placement(positions_BT, placed, spans)


# ---- parameters ---------------------------------------------------------------------------------


def bind(model: Qwen3_5, params: Params) -> Qwen3_5:
    """The module with these arrays in it, for calls inside a jitted function."""
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def declarations(model: Qwen3_5) -> dict[tuple[str, ...], nnx.Param]:
    """Every parameter's declaration (shape, axes, init, float32) by its path in the tree."""
    return {tuple(path): param for path, param in nnx.to_flat_state(nnx.state(model))}


def abstract_params(
    model: Qwen3_5, mesh: jax.sharding.Mesh | None = None, dtype: str = "float32"
) -> Params:
    """The parameter tree as shapes, dtypes and (with a mesh) shardings; no array is made.

    Args:
      model: an abstract model.
      mesh: where the parameters will live; None leaves shardings open.
      dtype: of all parameters but those that stay float32 (the delta net's decay rate and norm).

    Raises:
      ValueError: the mesh does not divide a parameter; names parameter, axis and sizes.
    """
    tree: Params = {}
    for path, param in declarations(model).items():
        shape = param.get_value().shape
        sharding = None if mesh is None else param_sharding(mesh, ".".join(path), shape, param.axes)
        leaf = jax.ShapeDtypeStruct(
            shape, jnp.float32 if param.float32 else jnp.dtype(dtype), sharding=sharding
        )
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def init_params(
    model: Qwen3_5, key: jax.Array, mesh: jax.sharding.Mesh | None = None, dtype: str = "float32"
) -> Params:
    """Random parameters, each made where it will live; the values do not depend on the mesh."""
    abstract = abstract_params(model, mesh, dtype)
    flat = declarations(model)
    keys = dict(zip(flat, jax.random.split(key, len(flat)), strict=True))

    def build():
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: flat[_names(path)].init(
                keys[_names(path)], leaf.shape, jnp.float32
            ).astype(leaf.dtype),
            abstract,
        )

    shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(build, out_shardings=shardings)()


def _names(path: tuple) -> tuple[str, ...]:
    return tuple(entry.key for entry in path)


def forward(model: Qwen3_5, params: Params, tokens_BT: jax.Array, **call: Any) -> Output:
    """`bind` and call: hidden states of `params` on tokens. See `Qwen3_5.__call__`."""
    return bind(model, params)(tokens_BT, **call)


def logits(model: Qwen3_5, params: Params, hidden_BTD: jax.Array, run: Execution) -> jax.Array:
    """Logits [B, T, V] (or, with a value head, values [B, T]) of hidden states."""
    return bind(model, params).head(hidden_BTD, run)

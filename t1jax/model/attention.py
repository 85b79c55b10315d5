"""Gated grouped-query attention: of a call's own tokens, or of a cache that they were added to.

Owns the causal and segment mask: query t sees key s when s is not later in the row and both lie
in the same segment. A row of the cache is one segment. Own tokens go through a kernel that is
blockwise on CPU and splash on TPU; a cache is read a block of columns at a time, in place, and only
as far as its longest row is filled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from t1jax.model.config import ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.layers import RMSNorm, StackShape, declare, normal, rotary_tables, rotate
from t1jax.model.sharding import RULES, constrain, per_shard, spec

QUERY_BLOCK = 128  # queries whose scores are alive at once, on CPU
CACHE_BLOCK = 256  # columns of a cache that are read at once


class KeyValues(NamedTuple):
    """Keys (normed and rotated) and values: [B, S, K, H] each.

    In a cache both are stacked over the groups of layers, [groups, B, capacity, K, H]; column s of
    row b is written when s is below the row's length.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array


class Placed(NamedTuple):
    """Where tokens stand in their rows: column in the row's stream, and segment (0: padding)."""

    column_BT: jax.Array
    segment_BT: jax.Array


class Attention(nnx.Module):
    """q, k, v with per-head norms and rotary positions; the output is gated before projection."""

    def __init__(self, config: ModelConfig, stack: StackShape):
        a, D = config.attention, config.embed
        self.config = a
        heads, kv = ("embed", "heads", None), ("embed", "kv_heads", None)
        self.q = declare(stack, (D, a.heads, a.head_dim), heads, normal())
        self.gate = declare(stack, (D, a.heads, a.head_dim), heads, normal())
        self.k = declare(stack, (D, a.kv_heads, a.head_dim), kv, normal())
        self.v = declare(stack, (D, a.kv_heads, a.head_dim), kv, normal())
        self.out = declare(stack, (a.heads, a.head_dim, D), ("heads", None, "embed"), normal())
        self.q_norm = RMSNorm(a.head_dim, None, config.rms_eps, stack)
        self.k_norm = RMSNorm(a.head_dim, None, config.rms_eps, stack)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        placed: Placed,
        cached: tuple[KeyValues, jax.Array] | None,
        run: Execution,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns the layer's output and, when `cached` = (stack, group index), the new stack."""
        project = lambda w: jnp.einsum(  # noqa: E731
            "BTD,DNH->BTNH", x_BTD, w[...].astype(x_BTD.dtype), precision=run.precision
        )
        tables = rotary_tables(
            positions_BT, self.config.rope_theta, self.config.rotary_dims, x_BTD.dtype
        )
        q_BTNH = rotate(self.q_norm(project(self.q)), *tables)
        k_BTKH = rotate(self.k_norm(project(self.k)), *tables)
        v_BTKH = project(self.v)
        keys, stack = KeyValues(k_BTKH, v_BTKH), None
        if cached is None:
            mixed_BTNH = attend(q_BTNH, keys, placed, run)
        else:
            stack = _append(*cached, keys, placed)
            mixed_BTNH = attend_cache(q_BTNH, stack, cached[1], placed, run)
        gated_BTNH = mixed_BTNH * jax.nn.sigmoid(project(self.gate))
        out_BTD = jnp.einsum(
            "BTNH,NHD->BTD", gated_BTNH, self.out[...].astype(x_BTD.dtype), precision=run.precision
        )
        return constrain(out_BTD, run.mesh, "rows", "positions", None), stack


def _append(stack: KeyValues, group: jax.Array, new: KeyValues, placed: Placed) -> KeyValues:
    """Writes new columns at their place; padding goes nowhere (its column is out of range)."""
    capacity = stack.k_BSKH.shape[2]
    row_B1 = jnp.arange(placed.column_BT.shape[0])[:, None]
    column_BT = jnp.where(placed.segment_BT > 0, placed.column_BT, capacity)
    return jax.tree.map(
        lambda old, x: old.at[group, row_B1, column_BT].set(x.astype(old.dtype), mode="drop"),
        stack,
        new,
    )


def attend(q_BTNH: jax.Array, keys: KeyValues, placed: Placed, run: Execution) -> jax.Array:
    """softmax(q k / sqrt(H)) v under the causal segment mask; sharded over rows, context, heads.

    Args:
      q_BTNH: queries, rotated.
      keys: of the same tokens, [B, T, K, H]; query head n reads kv head n // (N / K).
      placed: columns and segments of the tokens, int32 [B, T].

    Returns:
      [B, T, N, H]. Padding queries get finite values without meaning.
    """
    rows, along, heads = (spec(name)[0] for name in ("rows", "positions", "heads"))
    queries = PartitionSpec(rows, along, heads, None)
    key = PartitionSpec(rows, along, None, None)
    at = Placed(PartitionSpec(rows, along), PartitionSpec(rows, along))

    def local(q_BTNH, keys, placed):
        keys, keys_at = _whole_context((keys, placed), run)
        keys = _heads_read_here(q_BTNH, keys, run)
        kernel = _splash if run.attention == "splash" else _blockwise
        return kernel(q_BTNH, keys, placed, keys_at)

    return per_shard(local, run.mesh, (queries, KeyValues(key, key), at), queries)(
        q_BTNH, keys, placed
    )


def attend_cache(
    q_BTNH: jax.Array, stack: KeyValues, group: jax.Array, placed: Placed, run: Execution
) -> jax.Array:
    """The same over one layer's cache, to which the queries' own keys have been added.

    One program for every length: the loop over blocks of columns ends where the longest row does,
    so that a step costs what the cache holds and not what it has room for.

    Args:
      q_BTNH: queries, rotated.
      stack: caches of all groups [groups, B, S, K, H]; no layer's is copied out.
      group: which one.
      placed: columns of the queries in their rows; segment 0: padding, anything else: real.
    """
    rows, heads = spec("rows")[0], spec("heads")[0]
    queries = PartitionSpec(rows, None, heads, None)
    key = PartitionSpec(None, rows, None, None, None)
    at = Placed(PartitionSpec(rows, None), PartitionSpec(rows, None))

    def local(q_BTNH, stack, group, placed):
        return _over_filled_blocks(q_BTNH, stack, group, placed, run)

    return per_shard(
        local, run.mesh, (queries, KeyValues(key, key), PartitionSpec(), at), queries
    )(q_BTNH, stack, group, placed)


def _over_filled_blocks(q_BTNH, stack: KeyValues, group, placed: Placed, run: Execution):
    """Softmax over blocks of columns one after another, with a running maximum and sum."""
    B, T, N, H = q_BTNH.shape
    capacity = stack.k_BSKH.shape[2]
    size = min(CACHE_BLOCK, capacity)
    last_BT = jnp.where(placed.segment_BT > 0, placed.column_BT, -1)  # the newest column it sees
    kv = _heads_read_here(q_BTNH, jax.tree.map(lambda x: x[0, :, :1], stack), run)
    K = kv.k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)

    def read_block(j, carry):
        peak_BKGT, total_BKGT, out_BKGTH = carry
        # The last block begins earlier where the capacity is no multiple; what the one before it
        # has read is masked.
        begin = jnp.minimum(j * size, capacity - size)
        keys = jax.tree.map(lambda x: _columns(x, group, begin, size).astype(q_BTNH.dtype), stack)
        keys = _heads_read_here(q_BTNH, keys, run)
        column_S = begin + jnp.arange(size)
        new_S = column_S >= j * size
        seen_BTS = new_S & (column_S <= last_BT[..., None])
        scores_BKGTS = H**-0.5 * jnp.einsum(
            "BTKGH,BSKH->BKGTS", q_BTKGH, keys.k_BSKH, preferred_element_type=jnp.float32,
            precision=_precision(q_BTNH),
        )
        scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, -jnp.inf)
        higher_BKGT = jnp.maximum(peak_BKGT, scores_BKGTS.max(axis=-1))
        weights_BKGTS = jnp.exp(scores_BKGTS - higher_BKGT[..., None])
        shrink_BKGT = jnp.exp(peak_BKGT - higher_BKGT)
        # A column that nobody of its row sees may hold what an earlier owner of the row left.
        written_BS = column_S <= last_BT.max(axis=1)[:, None]
        v_BSKH = jnp.where(written_BS[..., None, None], keys.v_BSKH, 0)
        added_BKGTH = jnp.einsum(
            "BKGTS,BSKH->BKGTH", weights_BKGTS.astype(q_BTNH.dtype), v_BSKH,
            preferred_element_type=jnp.float32, precision=_precision(q_BTNH),
        )
        total_BKGT = total_BKGT * shrink_BKGT + weights_BKGTS.sum(axis=-1)
        return higher_BKGT, total_BKGT, out_BKGTH * shrink_BKGT[..., None] + added_BKGTH

    shape = (B, K, N // K, T)
    nothing = (  # a finite peak: exp(-inf - -inf) is not a number
        jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    blocks = (last_BT.max(initial=-1) + size) // size
    _, total_BKGT, out_BKGTH = jax.lax.fori_loop(0, blocks, read_block, nothing)
    mixed_BKGTH = out_BKGTH / jnp.where(total_BKGT > 0, total_BKGT, 1)[..., None]
    return jnp.moveaxis(mixed_BKGTH, 3, 1).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _columns(stack: jax.Array, group: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    """Columns begin..begin+size-1 of one group's cache: [B, size, K, H]."""
    zero = jnp.zeros_like(begin)
    starts = (group.astype(begin.dtype), zero, begin, zero, zero)
    _, B, _, K, H = stack.shape
    return jax.lax.dynamic_slice(stack, starts, (1, B, size, K, H))[0]


def _whole_context(tree, run: Execution):
    """Gathers keys, values and their places over the context axis (few kv heads: small)."""
    (axis,) = RULES["positions"]
    if run.mesh.shape[axis] == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), tree)


def _heads_read_here(q_BTNH: jax.Array, keys: KeyValues, run: Execution) -> KeyValues:
    """The kv heads that this shard's query heads read."""
    (axis,) = RULES["heads"]
    shards = run.mesh.shape[axis]
    if shards == 1:
        return keys
    local, kv = q_BTNH.shape[2], keys.k_BSKH.shape[2]
    group = local * shards // kv
    if local % group and group % local:
        raise ValueError(
            f"tensor={shards}: {local} query heads a shard straddle groups of {group} per kv head"
        )
    start = jax.lax.axis_index(axis) * local // group
    count = max(local // group, 1)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count, axis=2), keys)


def _blockwise(
    q_BTNH: jax.Array, keys: KeyValues, queries_at: Placed, keys_at: Placed
) -> jax.Array:
    """One block of queries at a time: memory grows with S, not with T times S.

    Each block's scores are computed again in the backward pass instead of being kept.
    """
    B, T, N, H = q_BTNH.shape
    blocks = -(-T // QUERY_BLOCK)
    if blocks == 1:
        return _scores_to_values(q_BTNH, keys, queries_at, keys_at)
    pad = blocks * QUERY_BLOCK - T

    def cut(x):
        padded = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, blocks, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def block(q_BTNH, at):
        return _scores_to_values(q_BTNH, keys, at, keys_at)

    _, out = jax.lax.scan(
        lambda carry, x: (carry, block(*x)),
        None,
        (cut(q_BTNH), jax.tree.map(cut, queries_at)),
    )
    return jnp.moveaxis(out, 0, 1).reshape(B, blocks * QUERY_BLOCK, N, H)[:, :T]


def _scores_to_values(q_BTNH, keys, queries_at, keys_at):
    B, T, N, H = q_BTNH.shape
    K = keys.k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    mask_BTS = (
        (keys_at.column_BT[:, None] <= queries_at.column_BT[:, :, None])
        & (keys_at.segment_BT[:, None] == queries_at.segment_BT[:, :, None])
        & (queries_at.segment_BT[:, :, None] > 0)
    )
    scores_BKGTS = H**-0.5 * jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, keys.k_BSKH, preferred_element_type=jnp.float32,
        precision=_precision(q_BTNH),
    )
    # Finite, so that a query that sees nothing (padding) has finite gradients.
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTNH.dtype)
    out_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH", probs_BKGTS, keys.v_BSKH, precision=_precision(q_BTNH)
    )
    return out_BTKGH.reshape(B, T, N, H)


def _precision(x: jax.Array) -> str | None:
    return "highest" if x.dtype == jnp.float32 else None


def _splash(q_BTNH, keys, queries_at, keys_at):
    """TPU: Pallas splash attention, causal by column with segment ids, one kernel a row.

    Columns count from 0 in every row here (no cache), so the causal mask is static; with the
    context axis the queries are a slice of the columns and the blockwise kernel runs instead.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    B, T, N, H = q_BTNH.shape
    S, K = keys.k_BSKH.shape[1:3]
    if T != S:
        return _blockwise(q_BTNH, keys, queries_at, keys_at)
    mask = masks.MultiHeadMask([masks.CausalMask((T, S))] * (N // K))
    kernel = splash.make_splash_mqa_single_device(mask)
    q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in keys)
    segments = splash.SegmentIds(queries_at.segment_BT, keys_at.segment_BT)
    per_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out_BKGTH = jax.vmap(per_head)(q_BKGTH, k_BKSH, v_BKSH, segments)
    out_BTNH = out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return out_BTNH * (queries_at.segment_BT > 0)[:, :, None, None].astype(out_BTNH.dtype)


def empty_cache(config: ModelConfig, rows: int, capacity: int, dtype: str) -> KeyValues:
    """Room for `capacity` columns in each of `rows` rows, for one layer of every group."""
    a = config.attention
    shape = (config.groups, rows, capacity, a.kv_heads, a.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

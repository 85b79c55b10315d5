"""The gated delta net: a linear-time mixer whose memory is one matrix per value head.

Per value head, with state S [X, Y] in float32 and S = 0 at the start of a segment:

    S = exp(g_t) S;   S = S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

Three forms of the same recurrence live here: chunked (many tokens), one step (decoding), and, over
the context axis of the mesh, chunked on every shard with the state handed from shard to shard.

The chunked form, per chunk with G = cumsum(g) (arXiv 2412.06464, section 3):

    D_ts = exp(G_t - G_s) for t >= s, else 0      A = tril(beta_t (k_t . k_s) D_ts, -1)
    U, W = (I + A)^-1 [beta v, beta k exp(G)]     v' = U - W S
    o = (q exp(G)) S + ((q k^T) * D) v'           S = exp(G_C) S + (k exp(G_C - G))^T v'
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from t1jax.model.config import DeltaConfig, ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.layers import StackShape, declare, l2_norm, log_uniform, normal, ones
from t1jax.model.sharding import RULES, constrain, per_shard, spec


class DeltaState(NamedTuple):
    """What a row's past leaves behind: three convolution columns and the recurrent state.

    In a cache each is stacked over the groups of layers (a leading axis). It cannot be cropped:
    going back to an earlier position needs a copy made there.
    """

    q_BWJX: jax.Array  # the last W-1 inputs of the convolution, oldest first
    k_BWJX: jax.Array
    v_BWIY: jax.Array
    state_BIXY: jax.Array  # float32


class Spans(NamedTuple):
    """Segments as the delta net needs them: padding belongs to the segment before it.

    `segment_BT` never falls along a row. `before_BT` is the segment of the column to the left
    (of the cached past, or -1 for none, in column 0).
    """

    valid_BT: jax.Array
    segment_BT: jax.Array
    before_BT: jax.Array

    @classmethod
    def of(cls, segment_BT: jax.Array, continues: bool) -> "Spans":
        """From segment ids that rise along each row (0: padding); `continues` a cached past."""
        filled_BT = jax.lax.cummax(segment_BT, axis=1)
        past_B1 = jnp.full_like(filled_BT[:, :1], 1 if continues else -1)
        before_BT = jnp.concatenate([past_B1, filled_BT[:, :-1]], axis=1)
        if continues:  # leading padding belongs to the past
            filled_BT, before_BT = jnp.maximum(filled_BT, 1), jnp.maximum(before_BT, 1)
        return cls(segment_BT > 0, filled_BT, before_BT)


class DeltaNet(nnx.Module):
    """Projections, causal convolution, the recurrence, and a gated norm per head."""

    def __init__(self, config: ModelConfig, stack: StackShape):
        d, D = config.delta, config.embed
        self.config, self.epsilon = d, config.rms_eps
        key, value = (d.key_heads, d.key_dim), (d.value_heads, d.value_dim)
        keys, values = ("key_heads", None), ("value_heads", None)
        self.q = declare(stack, (D, *key), ("embed", *keys), normal())
        self.k = declare(stack, (D, *key), ("embed", *keys), normal())
        self.v = declare(stack, (D, *value), ("embed", *values), normal())
        self.gate = declare(stack, (D, *value), ("embed", *values), normal())
        self.write = declare(stack, (D, d.value_heads), ("embed", "value_heads"), normal())
        self.decay = declare(stack, (D, d.value_heads), ("embed", "value_heads"), normal())
        taps = (d.conv_width,)
        self.q_conv = declare(stack, taps + key, (None, *keys), normal(0.1))
        self.k_conv = declare(stack, taps + key, (None, *keys), normal(0.1))
        self.v_conv = declare(stack, taps + value, (None, *values), normal(0.1))
        self.log_rate = declare(
            stack, (d.value_heads,), ("value_heads",), log_uniform, float32=True
        )
        self.decay_bias = declare(stack, (d.value_heads,), ("value_heads",), ones)
        self.scale = declare(stack, (d.value_dim,), (None,), ones, float32=True)
        self.out = declare(stack, (*value, D), (*values, "embed"), normal())

    def __call__(
        self,
        x_BTD: jax.Array,
        spans: Spans,
        past: DeltaState | None,
        run: Execution,
    ) -> tuple[jax.Array, DeltaState | None]:
        """Returns the layer's output and, when a past is given, the state after the last token."""
        x_BTD = jnp.where(spans.valid_BT[..., None], x_BTD, 0)
        project = lambda w: jnp.einsum(  # noqa: E731
            "BTD,D...->BT...", x_BTD, w[...].astype(x_BTD.dtype), precision=run.precision
        )
        columns = project(self.q), project(self.k), project(self.v)
        kernels = self.q_conv[...], self.k_conv[...], self.v_conv[...]
        contexts = (None,) * 3 if past is None else past[:3]
        q_BTJX, k_BTJX, v_BTIY = (
            jax.nn.silu(causal_convolution(x, w, context, spans))
            for x, w, context in zip(columns, kernels, contexts, strict=True)
        )
        beta_BTI, g_BTI = self.write_and_decay(project, spans)
        state = None if past is None else past.state_BIXY
        mixed_BTIY, state = mix(
            *map(_float32, (q_BTJX, k_BTJX, v_BTIY, beta_BTI)), g_BTI, state, spans, run
        )
        normed_BTIY = self.gated_norm(mixed_BTIY.astype(x_BTD.dtype), project(self.gate))
        out_BTD = jnp.einsum(
            "BTIY,IYD->BTD", normed_BTIY, self.out[...].astype(x_BTD.dtype),
            precision=run.precision,
        )
        out_BTD = constrain(out_BTD, run.mesh, "rows", "positions", None)
        if past is None:
            return out_BTD, None
        kept = (_last_columns(c, x, spans) for c, x in zip(contexts, columns, strict=True))
        return out_BTD, DeltaState(*kept, state)

    def write_and_decay(self, project, spans: Spans) -> tuple[jax.Array, jax.Array]:
        """Write strength beta in (0, 1), in x's dtype, and log decay g <= 0 in float32.

        Padding writes nothing and forgets nothing.
        """
        beta_BTI = jax.nn.sigmoid(project(self.write))
        rate_I = jnp.exp(_float32(self.log_rate[...]))
        bias_I = _float32(self.decay_bias[...])
        g_BTI = -rate_I * jax.nn.softplus(_float32(project(self.decay)) + bias_I)
        valid_BT1 = spans.valid_BT[..., None]
        return jnp.where(valid_BT1, beta_BTI, 0), jnp.where(valid_BT1, g_BTI, 0)

    def gated_norm(self, x_BTIY: jax.Array, gate_BTIY: jax.Array) -> jax.Array:
        """RMS norm per head with plain weight (not 1 + w), then the silu gate."""
        x32 = _float32(x_BTIY)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + self.epsilon)
        scaled = _float32(normed.astype(x_BTIY.dtype)) * _float32(self.scale[...])
        return (scaled * jax.nn.silu(_float32(gate_BTIY))).astype(x_BTIY.dtype)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def causal_convolution(
    x_BTF: jax.Array, w_WF: jax.Array, context_BWF: jax.Array | None, spans: Spans
) -> jax.Array:
    """c_t = sum_j w_j x_{t-W+1+j}, per channel, never across a segment's start.

    Args:
      x_BTF: inputs [B, T, heads, width].
      w_WF: taps [W, heads, width]; the last one meets the current token.
      context_BWF: the W-1 inputs before column 0 [B, W-1, heads, width], or None for zeros.
      spans: segments; the context belongs to `spans.before_BT[:, 0]`.
    """
    width = w_WF.shape[0]
    T = x_BTF.shape[1]
    w_WF = w_WF.astype(x_BTF.dtype)
    if context_BWF is None:
        padded = jnp.pad(x_BTF, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
    else:
        padded = jnp.concatenate([context_BWF.astype(x_BTF.dtype), x_BTF], axis=1)
    past_B1 = jnp.broadcast_to(spans.before_BT[:, :1], (x_BTF.shape[0], width - 1))
    segment = jnp.concatenate([past_B1, spans.segment_BT], axis=1)
    total = x_BTF * w_WF[-1]
    for tap in range(width - 1):
        same_BT = segment[:, tap : tap + T] == spans.segment_BT
        total += jnp.where(same_BT[..., None, None], padded[:, tap : tap + T], 0) * w_WF[tap]
    return total


def _last_columns(context_BWF: jax.Array, x_BTF: jax.Array, spans: Spans) -> jax.Array:
    """The W-1 inputs up to the row's last valid token, for the next call's convolution.

    Valid tokens of a cached call are a prefix of the row, so they end at column `count`.
    """
    together = jnp.concatenate([context_BWF, x_BTF.astype(context_BWF.dtype)], axis=1)
    count_B = spans.valid_BT.sum(axis=1)
    column_BW = count_B[:, None] + jnp.arange(context_BWF.shape[1])
    return jnp.take_along_axis(together, column_BW[..., None, None], axis=1)


def mix(
    q_BTJX: jax.Array,
    k_BTJX: jax.Array,
    v_BTIY: jax.Array,
    beta_BTI: jax.Array,
    g_BTI: jax.Array,
    state_BIXY: jax.Array | None,
    spans: Spans,
    run: Execution,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over all positions; every argument and result is float32.

    Value head i uses key head i // (I / J). q and k are normalised here, q also scaled by
    X**-0.5. Returns the outputs [B, T, I, Y] and the state [B, I, X, Y] after the last token.
    """
    rows, along, heads = (spec(name)[0] for name in ("rows", "positions", "value_heads"))
    tokens, places = PartitionSpec(rows, along, heads, None), PartitionSpec(rows, along)
    per_head = PartitionSpec(rows, along, heads)
    whole = PartitionSpec(rows, heads, None, None)
    B, T, _, X = q_BTJX.shape
    if state_BIXY is None:
        state_BIXY = jnp.zeros((B, v_BTIY.shape[2], X, v_BTIY.shape[3]), jnp.float32)

    def local(q, k, v, beta, g, state, spans):
        q, k = l2_norm(q) * X**-0.5, l2_norm(k)
        if T == 1:
            return one_step(q, k, v, beta, g, state, spans)
        return chunked(q, k, v, beta, g, state, spans, run)

    return per_shard(
        local, run.mesh,
        (tokens, tokens, tokens, per_head, per_head, whole, Spans(places, places, places)),
        (tokens, whole),
    )(q_BTJX, k_BTJX, v_BTIY, beta_BTI, g_BTI, state_BIXY, spans)


def one_step(q_BTJX, k_BTJX, v_BTIY, beta_BTI, g_BTI, state_BIXY, spans):
    """The recurrence itself, for T = 1."""
    heads = v_BTIY.shape[2] // q_BTJX.shape[2]
    q_BIX, k_BIX = (jnp.repeat(x[:, 0], heads, axis=1) for x in (q_BTJX, k_BTJX))
    continues_B = spans.segment_BT[:, 0] == spans.before_BT[:, 0]
    decay_BI = jnp.where(continues_B[:, None], jnp.exp(g_BTI[:, 0]), 0.0)
    state_BIXY = state_BIXY * decay_BI[..., None, None]
    read_BIY = jnp.einsum("BIXY,BIX->BIY", state_BIXY, k_BIX, precision="highest")
    written_BIY = beta_BTI[:, 0, :, None] * (v_BTIY[:, 0] - read_BIY)
    state_BIXY = state_BIXY + k_BIX[..., None] * written_BIY[..., None, :]
    out_BIY = jnp.einsum("BIXY,BIX->BIY", state_BIXY, q_BIX, precision="highest")
    return out_BIY[:, None], state_BIXY


class Chunk(NamedTuple):
    """What one chunk needs besides the state that enters it. Leading axis Z while stacked."""

    u_BITY: jax.Array
    w_BITX: jax.Array
    inner_BITS: jax.Array  # (q k^T) * D
    q_BITX: jax.Array  # q exp(G), zero where the entering state belongs to another segment
    k_BITX: jax.Array  # k exp(G_C - G), zero outside the chunk's last segment
    keep_BI: jax.Array  # exp(G_C), or zero when a segment starts inside the chunk


def chunked(q_BTJX, k_BTJX, v_BTIY, beta_BTI, g_BTI, state_BIXY, spans, run: Execution):
    """Chunks prepared all at once, then a scan over chunks that carries the state."""
    T, size = q_BTJX.shape[1], run.chunk
    chunks = _prepare(q_BTJX, k_BTJX, v_BTIY, beta_BTI, g_BTI, spans, size)
    (axis,) = RULES["positions"]
    shards = run.mesh.shape[axis]
    if shards > 1:
        state_BIXY, last_BIXY = _states_across_shards(chunks, state_BIXY, axis, shards)
    final_BIXY, out_ZBITY = jax.lax.scan(_advance, state_BIXY, chunks)
    out_BTIY = out_ZBITY.transpose(1, 0, 3, 2, 4).reshape(q_BTJX.shape[0], -1, *v_BTIY.shape[2:])
    return out_BTIY[:, :T], final_BIXY if shards == 1 else last_BIXY


def _advance(state_BIXY, c: Chunk):
    """One chunk: its outputs, and the state that leaves it."""
    new_BITY = c.u_BITY - _dot("BITX,BIXY->BITY", c.w_BITX, state_BIXY)
    out_BITY = _dot("BITX,BIXY->BITY", c.q_BITX, state_BIXY)
    out_BITY += _dot("BITS,BISY->BITY", c.inner_BITS, new_BITY)
    added_BIXY = _dot("BITX,BITY->BIXY", c.k_BITX, new_BITY)
    return c.keep_BI[..., None, None] * state_BIXY + added_BIXY, out_BITY


def _dot(formula, *operands):
    return jnp.einsum(formula, *operands, precision="highest")


def _cut(x_BT, size: int, mode: str = "constant"):
    """[B, T, ...] to [Z, B, ..., size]-like chunks [Z, B, size, ...], padded at the end."""
    B, T = x_BT.shape[:2]
    pad = [(0, 0), (0, -T % size)] + [(0, 0)] * (x_BT.ndim - 2)
    padded = jnp.pad(x_BT, pad, mode=mode)
    return jnp.moveaxis(padded.reshape(B, -1, size, *x_BT.shape[2:]), 1, 0)


def _prepare(q_BTJX, k_BTJX, v_BTIY, beta_BTI, g_BTI, spans: Spans, size: int) -> Chunk:
    """Everything of a chunk that does not depend on the state, for all chunks at once."""
    heads = v_BTIY.shape[2] // q_BTJX.shape[2]
    q_ZBJTX, k_ZBJTX, v_ZBITY = (
        jnp.swapaxes(_cut(x, size), 2, 3) for x in (q_BTJX, k_BTJX, v_BTIY)
    )
    beta_ZBIT, g_ZBIT = (jnp.swapaxes(_cut(x, size), 2, 3) for x in (beta_BTI, g_BTI))
    # Padding continues the last segment, so that a chunk's last column names its last segment.
    segment_ZBT = _cut(spans.segment_BT, size, "edge")
    entering_ZB1 = _cut(spans.before_BT, size)[:, :, :1]
    same_ZB1TS = (segment_ZBT[..., :, None] == segment_ZBT[..., None, :])[:, :, None]
    from_state_ZB1T = (segment_ZBT == entering_ZB1)[:, :, None]
    to_state_ZB1T = (segment_ZBT == segment_ZBT[..., -1:])[:, :, None]
    keep_ZB1 = entering_ZB1 == segment_ZBT[..., -1:]

    total_ZBIT = jnp.cumsum(g_ZBIT, axis=-1)
    last_ZBI1 = total_ZBIT[..., -1:]
    lower_TS = jnp.tril(jnp.ones((size, size), bool))
    # The mask comes before exp: above the diagonal the exponent is positive and would overflow.
    decay_ZBITS = jnp.exp(
        jnp.where(
            same_ZB1TS & lower_TS, total_ZBIT[..., :, None] - total_ZBIT[..., None, :], -jnp.inf
        )
    )
    to_values = lambda x: jnp.repeat(x, heads, axis=2)  # noqa: E731
    kk_ZBITS = to_values(_dot("ZBJTX,ZBJSX->ZBJTS", k_ZBJTX, k_ZBJTX))
    qk_ZBITS = to_values(_dot("ZBJTX,ZBJSX->ZBJTS", q_ZBJTX, k_ZBJTX))
    q_ZBITX, k_ZBITX = to_values(q_ZBJTX), to_values(k_ZBJTX)
    grown_ZBIT = jnp.where(from_state_ZB1T, jnp.exp(total_ZBIT), 0.0)

    A_ZBITS = jnp.tril(beta_ZBIT[..., None] * kk_ZBITS * decay_ZBITS, -1)
    right_ZBITY = jnp.concatenate(
        [beta_ZBIT[..., None] * v_ZBITY, (beta_ZBIT * grown_ZBIT)[..., None] * k_ZBITX], axis=-1
    )
    solved = _dot("ZBITS,ZBISY->ZBITY", unit_lower_inverse(A_ZBITS), right_ZBITY)
    u_ZBITY, w_ZBITX = jnp.split(solved, (v_ZBITY.shape[-1],), axis=-1)
    left_ZBIT = jnp.where(to_state_ZB1T, jnp.exp(last_ZBI1 - total_ZBIT), 0.0)
    keep_ZBI = jnp.where(keep_ZB1, jnp.exp(last_ZBI1[..., 0]), 0.0)
    return Chunk(
        u_ZBITY, w_ZBITX, qk_ZBITS * decay_ZBITS,
        q_ZBITX * grown_ZBIT[..., None], k_ZBITX * left_ZBIT[..., None], keep_ZBI,
    )


@jax.custom_vjp
def unit_lower_inverse(A_TS: jax.Array) -> jax.Array:
    """(I + A)^-1 for strictly lower triangular A [..., T, T], float32, by halves.

    Matmuls only, as stable as forward substitution: [[a, 0], [c, b]]^-1 is
    [[a', 0], [-b' c a', b']].
    Not `triangular_solve`: on CPU two of them at once deadlock a two-thread pool (jaxlib 0.10.2:
    each blocks a worker while waiting for tasks queued on the same pool), and on TPU its loop over
    rows is slower. T must be a power of two.
    """
    size = A_TS.shape[-1]
    if size <= 8:  # (I - A)(I + A^2)(I + A^4) is exact: A^8 = 0
        product, power = jnp.eye(size) - A_TS, A_TS
        for _ in range(size.bit_length() - 2):
            power = _matmul(power, power)
            product = product + _matmul(product, power)
        return product
    half = size // 2
    a, b = unit_lower_inverse(jnp.stack([A_TS[..., :half, :half], A_TS[..., half:, half:]]))
    c = -_matmul(_matmul(b, A_TS[..., half:, :half]), a)
    return jnp.concatenate(
        [
            jnp.concatenate([a, jnp.zeros_like(a)], axis=-1),
            jnp.concatenate([c, b], axis=-1),
        ],
        axis=-2,
    )


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def _inverse_gradient(inverse_TS, d_TS):
    transposed_TS = jnp.swapaxes(inverse_TS, -1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed_TS, d_TS), transposed_TS), -1),)


unit_lower_inverse.defvjp(
    lambda A_TS: (unit_lower_inverse(A_TS),) * 2, _inverse_gradient
)


def _states_across_shards(chunks: Chunk, state_BIXY: jax.Array, axis: str, shards: int):
    """The state that enters this shard of the sequence, and the one that leaves the last.

    A run of chunks acts on the state as S -> M S + L. Each shard computes its M [X, X] and L
    [X, Y], the shards exchange those (not the sequence), and each folds those before it.
    """

    def summarise(carry, c: Chunk):
        M_BIXX, L_BIXY = carry
        step = lambda S: c.keep_BI[..., None, None] * S - _dot(  # noqa: E731
            "BITX,BITY->BIXY", c.k_BITX, _dot("BITX,BIXY->BITY", c.w_BITX, S)
        )
        added_BIXY = _dot("BITX,BITY->BIXY", c.k_BITX, c.u_BITY)
        return (step(M_BIXX), step(L_BIXY) + added_BIXY), None

    X = state_BIXY.shape[2]
    identity = jnp.broadcast_to(jnp.eye(X), (*state_BIXY.shape[:2], X, X))
    mine, _ = jax.lax.scan(summarise, (identity, jnp.zeros_like(state_BIXY)), chunks)
    everyone = jax.lax.all_gather(mine, axis)
    index = jax.lax.axis_index(axis)
    entering_BIXY = state_BIXY
    for shard in range(shards):
        entering_BIXY = jnp.where(shard == index, state_BIXY, entering_BIXY)
        M_BIXX, L_BIXY = (x[shard] for x in everyone)
        state_BIXY = _dot("BIXS,BISY->BIXY", M_BIXX, state_BIXY) + L_BIXY
    return entering_BIXY, state_BIXY


def empty_state(config: ModelConfig, rows: int, dtype: str) -> DeltaState:
    """The state before any token, for one delta-net layer of every group."""
    d: DeltaConfig = config.delta
    columns = (config.groups, rows, d.conv_width - 1)
    return DeltaState(
        jnp.zeros((*columns, d.key_heads, d.key_dim), dtype),
        jnp.zeros((*columns, d.key_heads, d.key_dim), dtype),
        jnp.zeros((*columns, d.value_heads, d.value_dim), dtype),
        jnp.zeros(
            (config.groups, rows, d.value_heads, d.key_dim, d.value_dim), jnp.float32
        ),
    )

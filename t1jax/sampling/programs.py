"""The jitted functions of the sampler: read a chunk, take a slot, give it back, decode.

    begin    a Prefix with room for a whole context, empty or from a shorter one
    extend   reads a chunk of tokens into a Prefix
    insert   puts a Prefix into a slot of the decode state
    decode   per slot: reads the last token, samples the next
    take     a slot as a Prefix, cut to what it holds
    release  slots that stop decoding

A stream of N tokens is held as N-1 tokens read and one `token` that is not: a decode step reads
that one and samples its successor, so that a token, its log-probs and the logits they come from
live in one step, and the step's route is of the token that was read. A slot stops by itself, at a
stop token or when it may sample no more; one that does not decode is padding: it writes nothing.

Everything is of fixed shape: `Programs` compiles one function per chunk length, per room of a kept
Prefix and per number of steps. Knows nothing of requests, queues or files.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from t1jax.model.attention import KeyValues
from t1jax.model.cache import Cache, cache_shardings, empty_cache
from t1jax.model.config import ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.qwen3_5 import Params, Qwen3_5, bind
from t1jax.model.sharding import axis_size
from t1jax.sampling import sampler
from t1jax.sampling.sampler import Settings

STOPS = 8  # stop tokens that a slot can have
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The fixed shapes of an engine."""

    slots: int
    context: int  # columns of a slot's cache
    prefill_chunk: int  # longest chunk that is read at once, a power of two
    capture_routes: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "context", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name}={getattr(self, name)}; expected 1 or more")
        if self.prefill_chunk & (self.prefill_chunk - 1):
            raise ValueError(
                f"sampler.prefill_chunk={self.prefill_chunk}; expected a power of two, such as 512"
            )

    def chunk(self, tokens: int) -> int:
        """The length that a chunk of so many tokens is padded to."""
        return max(1 << (tokens - 1).bit_length(), min(16, self.prefill_chunk))

    def room(self, tokens: int) -> int:
        """The columns that a kept Prefix of so many tokens has."""
        return min(max(1 << max(tokens - 1, 0).bit_length(), 64), self.context)


class Held(NamedTuple):
    """A stream on the device: what was read, and the last token, which was not."""

    cache: Cache  # of as many rows as the mesh splits rows into; row 0 is meant
    token: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All slots. A slot that is not active keeps what it holds."""

    cache: Cache
    token_B: jax.Array  # int32, sampled or given last, not read yet
    active_B: jax.Array  # bool
    sampled_B: jax.Array  # int32, tokens sampled since the slot was filled
    left_B: jax.Array  # int32, tokens that may still be sampled
    stops_BQ: jax.Array  # int32 [B, STOPS], NO_TOKEN where there is none
    settings: Settings


class Step(NamedTuple):
    """What decode steps give for each slot, on every device; T counts the steps."""

    packed_BT: jax.Array  # int32 [B, 2 T + 1]: tokens; 1 where the slot was active; sampled_B
    raw_logprob_BT: jax.Array
    filtered_logprob_BT: jax.Array
    routes_BTLC: jax.Array  # of the tokens read; L = 0 where routes are not captured


class Programs:
    """The compiled functions for one model, mesh and set of sizes."""

    def __init__(self, config: ModelConfig, run: Execution, sizes: Sizes):
        if run.mesh.shape["context"] > 1:
            raise ValueError(
                f"mesh context={run.mesh.shape['context']}: decoding reads one token at a time, "
                "which does not divide; sample on a mesh with context=1"
            )
        self.rows = axis_size(run.mesh, "rows")
        if sizes.slots % self.rows:
            raise ValueError(
                f"sampler.slots={sizes.slots} does not divide into the {self.rows} parts of rows "
                "that the mesh has (data * fsdp * expert); choose a multiple"
            )
        self.config, self.run, self.sizes = config, run, sizes
        one, two = (_bytes_of(config, columns, run.dtype) for columns in (1, 2))
        self._column_bytes, self._state_bytes = two - one, 2 * one - two
        whole = NamedSharding(run.mesh, PartitionSpec())
        cache = cache_shardings(config, run.mesh)
        self.held_at = Held(cache, whole)
        settings = Settings(temperature_B=whole, top_k_B=whole, top_p_B=whole, seed_B=whole)
        state = DecodeState(
            cache=cache, token_B=whole, active_B=whole, sampled_B=whole, left_B=whole,
            stops_BQ=whole, settings=settings,
        )
        jit = functools.partial(jax.jit, compiler_options=run.compiler_options)
        self.init = jit(self._init, out_shardings=state)
        self.empty = jit(self._empty, out_shardings=self.held_at)
        self.begin = jit(self._begin, out_shardings=self.held_at)
        self.extend = jit(self._extend, donate_argnums=1, out_shardings=(self.held_at, whole))
        self.insert = jit(self._insert, donate_argnums=1, out_shardings=state)
        self.release = jit(self._release, donate_argnums=0, out_shardings=state)
        self.take = jit(self._take, static_argnames="room", out_shardings=self.held_at)
        self.decode = jit(
            self._decode, static_argnames="steps", donate_argnums=1, out_shardings=(state, whole)
        )

    def kept_bytes(self, tokens: int) -> int:
        """What `take` of so many tokens read holds on a device that has its row."""
        return self._state_bytes + self.sizes.room(tokens) * self._column_bytes

    def _fresh_cache(self, rows: int) -> Cache:
        return empty_cache(self.config, rows, self.sizes.context, self.run.dtype)

    def _init(self) -> DecodeState:
        B = self.sizes.slots
        zeros = functools.partial(jnp.zeros, B)
        return DecodeState(
            cache=self._fresh_cache(B), token_B=zeros(jnp.int32), active_B=zeros(bool),
            sampled_B=zeros(jnp.int32), left_B=zeros(jnp.int32),
            stops_BQ=jnp.full((B, STOPS), NO_TOKEN, jnp.int32),
            settings=Settings(
                temperature_B=zeros(jnp.float32), top_k_B=zeros(jnp.int32),
                top_p_B=jnp.ones(B, jnp.float32), seed_B=zeros(jnp.uint32),
            ),
        )  # fmt: skip

    def _empty(self, token: jax.Array) -> Held:
        return Held(self._fresh_cache(self.rows), token)

    def _begin(self, kept: Held) -> Held:
        """A copy with room for a whole context."""
        fresh = self._fresh_cache(self.rows)
        layers = tuple(
            jax.tree.map(lambda a, b: a.at[:, :, : b.shape[2]].set(b), new, old)
            if isinstance(old, KeyValues)
            else old
            for new, old in zip(fresh.layers, kept.cache.layers, strict=True)
        )
        return Held(Cache(layers, kept.cache.length_B), kept.token)

    def _extend(
        self, params: Params, held: Held, tokens_T: jax.Array, count: jax.Array, token: jax.Array
    ) -> tuple[Held, jax.Array]:
        """Reads `count` of the tokens; `token` is then the one that was not read."""
        T = tokens_T.shape[0]
        tokens_BT = jnp.broadcast_to(tokens_T, (self.rows, T))
        real_BT = (jnp.arange(T) < count) & (jnp.arange(self.rows) == 0)[:, None]
        bound: Any = bind(Qwen3_5(self.config), params)
        out = bound(
            tokens_BT, segments_BT=real_BT.astype(jnp.int32), run=self.run, cache=held.cache
        )
        routes_TLC = jnp.moveaxis(out.routes_LBTC[:, 0], 1, 0)
        return Held(out.cache, token), self._captured(routes_TLC)

    def _captured(self, routes_PLC: jax.Array) -> jax.Array:
        return routes_PLC if self.sizes.capture_routes else routes_PLC[:, :0]

    def _insert(self, held: Held, state: DecodeState, slot: jax.Array, row: "Row") -> DecodeState:
        """Row 0 of a Held becomes a slot; columns beyond it keep what nobody will read."""

        def place(old, new):
            at = (0, slot, *(0,) * (old.ndim - 2))
            return jax.lax.dynamic_update_slice(old, new[:, :1], tuple(map(_index, at)))

        layers = jax.tree.map(place, state.cache.layers, held.cache.layers)
        cache = Cache(layers, state.cache.length_B.at[slot].set(held.cache.length_B[0]))
        put = lambda old, new: old.at[slot].set(jnp.asarray(new, old.dtype))  # noqa: E731
        return DecodeState(
            cache=cache,
            token_B=put(state.token_B, held.token),
            active_B=put(state.active_B, row.left > 0),
            sampled_B=put(state.sampled_B, 0),
            left_B=put(state.left_B, row.left),
            stops_BQ=put(state.stops_BQ, row.stops_Q),
            settings=jax.tree.map(put, state.settings, row.settings),
        )

    def _release(self, state: DecodeState, released_B: jax.Array) -> DecodeState:
        return dataclasses.replace(state, active_B=state.active_B & ~released_B)

    def _take(self, state: DecodeState, slot: jax.Array, *, room: int) -> Held:
        """A slot as a Held of `room` columns; the slot stays as it is."""

        def cut(x, is_columns: bool):
            row = jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=1)
            row = row[:, :, :room] if is_columns else row
            return jnp.pad(row, [(0, 0), (0, self.rows - 1)] + [(0, 0)] * (x.ndim - 2))

        layers = tuple(
            jax.tree.map(functools.partial(cut, is_columns=isinstance(layer, KeyValues)), layer)
            for layer in state.cache.layers
        )
        length_B = jnp.where(jnp.arange(self.rows) == 0, state.cache.length_B[slot], 0)
        return Held(Cache(layers, length_B), state.token_B[slot])

    def _decode(
        self, params: Params, state: DecodeState, *, steps: int
    ) -> tuple[DecodeState, Step]:
        """`steps` tokens for every active slot."""
        bound: Any = bind(Qwen3_5(self.config), params)
        one = functools.partial(self._decode_one, bound)
        state, by_step = jax.lax.scan(lambda state, _: one(state), state, None, length=steps)
        token_BT, valid_BT, *rest = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), by_step)
        packed_BT = jnp.concatenate(
            [token_BT, valid_BT.astype(jnp.int32), state.sampled_B[:, None]], axis=1
        )
        return state, Step(packed_BT, *rest)

    def _decode_one(self, bound: Any, state: DecodeState) -> tuple[DecodeState, tuple]:
        """Reads each slot's last token, samples the next, and stops slots that are done."""
        active_B = state.active_B
        out = bound(
            state.token_B[:, None], segments_BT=active_B.astype(jnp.int32)[:, None],
            run=self.run, cache=state.cache,
        )  # fmt: skip
        with jax.named_scope("head"):
            logits_BV = bound.head(out.hidden_BTD, self.run)[:, 0]
        with jax.named_scope("draw"):
            drawn = sampler.draw(logits_BV, out.cache.length_B, state.settings)
        token_B = jnp.where(active_B, drawn.token_B, state.token_B)
        left_B = jnp.where(active_B, state.left_B - 1, state.left_B)
        stopped_B = jnp.any(state.stops_BQ == token_B[:, None], axis=1)
        routes_BLC = self._captured(jnp.moveaxis(out.routes_LBTC[:, :, 0], 1, 0))
        step = (
            token_B, active_B, drawn.raw_logprob_B, drawn.filtered_logprob_B, routes_BLC,
        )  # fmt: skip
        return dataclasses.replace(
            state, cache=out.cache, token_B=token_B, left_B=left_B,
            sampled_B=state.sampled_B + active_B.astype(jnp.int32),
            active_B=active_B & ~stopped_B & (left_B > 0),
        ), step


def _bytes_of(config: ModelConfig, columns: int, dtype: str) -> int:
    """Of one row with room for so many columns."""
    held = jax.eval_shape(lambda: empty_cache(config, 1, columns, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))


def _index(i: Any) -> jax.Array:
    return jnp.asarray(i, jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """How one slot decodes; host values or device scalars."""

    left: Any  # tokens that may be sampled
    stops_Q: Any  # int32 [STOPS]
    settings: Settings  # of scalars


@functools.cache  # engines of the same sizes share what they compiled
def make_programs(config: ModelConfig, run: Execution, sizes: Sizes) -> Programs:
    """The programs; nothing is compiled before its first use."""
    return Programs(config, run, sizes)

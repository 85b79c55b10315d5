"""T1Engine: Qwen3.5-MoE behind google-jetstream's Engine contract (release 0.2.2).

    prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=n)
    state = engine.insert(prefix, engine.init_decode_state(), slot=3)
    state, result = engine.generate(params, state)       # the first token, with its log-probs

Owns the translation between that contract and `programs`, and the checks of what a caller hands in.
Arguments that the contract does not have are keyword-only with defaults. Upstream's later names
exist too; where the two disagree (prefill gives a Prefix, or a Prefix and a first token) the
release is followed. Knows nothing of requests, queues, text or files: a tokenizer is an argument.

Importing this imports TensorFlow, through google-jetstream: import it where sampling begins.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetstream.engine.engine_api import Engine
from jetstream.engine.tokenizer_pb2 import TokenizerParameters

from t1jax.model.config import ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.qwen3_5 import Params, Qwen3_5, abstract_params
from t1jax.sampling import sampler
from t1jax.sampling.programs import (
    NO_TOKEN,
    STOPS,
    DecodeState,
    Held,
    Row,
    Sizes,
    make_programs,
)
from t1jax.sampling.results import Result, make_result
from t1jax.sampling.sampler import Settings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """A stream of `length` tokens: all but the last are read, the last is `held.token`.

    `routes` are those of the tokens that were read to make it, one array [T, L, C] for each chunk,
    of which the first `counts` rows mean something; reading began at token `first`.
    """

    held: Held
    routes: tuple[Any, ...]
    counts: tuple[Any, ...]  # ints
    length: Any  # int
    first: Any  # int
    version: Any  # int: of the weights

    def read_routes(self) -> np.ndarray:
        """Routes [length - 1 - first, L, C] on the host, of tokens first..length-2; waits."""
        rows = [np.asarray(x)[: int(n)] for x, n in zip(self.routes, self.counts, strict=True)]
        return np.concatenate(rows) if rows else np.zeros((0, 0, 0), np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """How a slot's tokens are drawn; see `sampler`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        sampler.check(**dataclasses.asdict(self))


PLAIN = Draw()


class T1Engine(Engine):
    """The contract's methods, each a call of a compiled program; holds no device array."""

    def __init__(
        self,
        config: ModelConfig,
        run: Execution,
        sizes: Sizes,
        *,
        draw: Draw = PLAIN,
        tokenizer: Any = None,
        tokenizer_path: str = "",
    ):
        """`draw` and the tokenizer serve loops that know the contract alone."""
        self.config, self.run, self.sizes = config, run, sizes
        self.programs = make_programs(config, run, sizes)
        self._draw, self._tokenizer, self._tokenizer_path = draw, tokenizer, tokenizer_path

    # ---- the contract ---------------------------------------------------------------------------

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        sampler: Callable[..., Any] | None = None,
        request_id: Any = None,
        version: int = 0,
    ) -> Prefix:
        """Reads tokens, after those of `existing_prefix` (which stays as it is), chunk by chunk.

        Args:
          params: weights.
          existing_prefix: of the same weights.
          padded_tokens: int32 [T], of which `true_length` are real.
          true_length: 1 or more.
          sampler: upstream's; a request's settings are given to `insert`.
          request_id: upstream's; not used.
          version: of the weights, written into the Prefix.

        Raises:
          ValueError: no token, an id outside the vocabulary, more tokens than the context holds, or
            a prefix of other weights.
        """
        self._refuse_sampler(sampler)
        tokens = np.asarray(padded_tokens)
        if not 1 <= true_length <= len(tokens):
            raise ValueError(f"true_length={true_length}; expected 1 to the {len(tokens)} given")
        tokens = tokens[:true_length]
        if existing_prefix is not None:
            last = int(np.asarray(existing_prefix.held.token))
            tokens = np.concatenate([[last], tokens])
        self.check_tokens(tokens)
        prefix = self.begin(existing_prefix, first_token=int(tokens[0]), version=version)
        end = prefix.length + len(tokens) - 1
        if end > self.sizes.context:
            raise ValueError(f"{end} tokens do not fit in sampler.context={self.sizes.context}")
        while prefix.length < end:
            prefix = self.extend(params, prefix, tokens[prefix.length - end - 1 :])
        return prefix

    def generate(
        self,
        params: Params,
        decode_state: DecodeState,
        sampler: Callable[..., Any] | None = None,
        *,
        steps: int = 1,
    ) -> tuple[DecodeState, Result]:
        """The next token of every active slot, or `steps` of them; the state is used up."""
        self._refuse_sampler(sampler)
        state, step = self.programs.decode(params, decode_state, steps=steps)
        return state, make_result(step, steps)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        request_id: Any = None,
        *,
        draw: Draw | None = None,
        stop_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> DecodeState:
        """Puts a stream into a slot, which then decodes; the state is used up, the prefix is not.

        Args:
          prefix: a stream of this engine's context.
          decode_state: all slots.
          slot: from 0.
          request_id: upstream's; not used.
          draw: how tokens are drawn; None: as the engine was made with.
          stop_ids: tokens after which the slot stops by itself; at most 8.
          max_tokens: after so many it stops too; None: when the context is full.
        """
        room = self.sizes.context - int(prefix.length)
        left = room if max_tokens is None else min(max_tokens, room)
        row = self._row(draw or self._draw, stop_ids, left)
        return self.programs.insert(prefix.held, decode_state, self._checked_slot(slot), row)

    def load_params(self, *args: Any, **kwargs: Any) -> Params:
        """Puts a tree of parameters where the engine wants it: `load_params(params)`."""
        (params,) = (*args, *kwargs.values())
        placed = abstract_params(Qwen3_5(self.config), self.run.mesh, self.run.dtype)
        return jax.tree.map(lambda x, want: jax.device_put(x, want.sharding), params, placed)

    def get_prefix_destination_sharding(self) -> Prefix:
        """Shardings of a Prefix, as a tree that leads its own."""
        whole = NamedSharding(self.run.mesh, PartitionSpec())
        rest = dict.fromkeys(("routes", "counts", "length", "first", "version"), whole)
        return Prefix(held=self.programs.held_at, **rest)

    def get_tokenizer(self) -> TokenizerParameters:
        """Where the tokenizer that the engine was made with came from."""
        return TokenizerParameters(path=self._tokenizer_path)

    def build_tokenizer(self, metadata: TokenizerParameters) -> Any:
        """The tokenizer that the engine was made with: Qwen's is no SentencePiece model."""
        if self._tokenizer is None:
            raise ValueError("T1Engine was made without tokenizer=; an outer loop needs one")
        return self._tokenizer

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Every slot empty."""
        return self.programs.init()

    @property
    def max_concurrent_decodes(self) -> int:
        return self.sizes.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest power of two within the context, as outer loops pad to powers of two."""
        return 1 << (self.sizes.context.bit_length() - 1)

    @property
    def mesh(self) -> Mesh:
        return self.run.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # ---- upstream's later names -----------------------------------------------------------------

    def prefill_multisampling(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        sampler: Callable[..., Any] | None = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> Prefix:
        """A Prefix: any number of slots can begin from one, each with its seed (`bulk_insert`)."""
        return self.prefill(
            params=params, existing_prefix=existing_prefix, padded_tokens=padded_tokens,
            true_length=true_length, sampler=sampler,
        )  # fmt: skip

    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: list[int], **how: Any
    ) -> DecodeState:
        """The same stream in several slots; slot number i of the list draws with seed + i."""
        draw = how.pop("draw", None) or self._draw
        for i, slot in enumerate(slots):
            mine = dataclasses.replace(draw, seed=(draw.seed + i) % 2**32)
            decode_state = self.insert(prefix, decode_state, slot, draw=mine, **how)
        return decode_state

    def free_resource(self, slot: int, *, decode_state: DecodeState | None = None) -> Any:
        """With a state: the same state, in which the slot no longer decodes."""
        return None if decode_state is None else self.release(decode_state, [slot])

    @property
    def use_chunked_prefill(self) -> bool:
        return True

    @property
    def prefill_chunk_size(self) -> int:
        return self.sizes.prefill_chunk

    # ---- what our scheduler uses besides --------------------------------------------------------

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Refuses ids that the model does not have."""
        bad = (tokens < 0) | (tokens >= self.config.vocab)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"token {at} has id {tokens[at]}; the vocabulary has 0..{self.config.vocab - 1}"
            )

    def begin(
        self, existing: Prefix | None, *, first_token: int = 0, version: int = 0
    ) -> Prefix:
        """A Prefix that `extend` may use up: `first_token` alone, or a copy of another."""
        if existing is None:
            held = self.programs.empty(np.int32(first_token))
            return Prefix(held=held, routes=(), counts=(), length=1, first=0, version=version)
        if int(existing.version) != version:
            raise ValueError(
                f"a prefix of weight version {int(existing.version)} cannot be continued by "
                f"version {version}; read its tokens again"
            )
        length = int(existing.length)
        return Prefix(
            held=self.programs.begin(existing.held), routes=(), counts=(), length=length,
            first=length - 1, version=version,
        )  # fmt: skip

    def extend(self, params: Params, prefix: Prefix, tokens: np.ndarray) -> Prefix:
        """Reads one chunk more; the prefix is used up.

        Args:
          params: weights.
          prefix: what `begin` or `extend` gave.
          tokens: the prefix's last token, which is not read yet, and those that follow; 2 or more.
        """
        count = min(len(tokens) - 1, self.sizes.prefill_chunk)
        padded_T = np.zeros(self.sizes.chunk(count), np.int32)
        padded_T[:count] = tokens[:count]
        held, routes_TLC = self.programs.extend(
            params, prefix.held, padded_T, np.int32(count), np.int32(tokens[count])
        )
        return dataclasses.replace(
            prefix, held=held, routes=(*prefix.routes, routes_TLC),
            counts=(*prefix.counts, count), length=prefix.length + count,
        )  # fmt: skip

    def take(
        self, decode_state: DecodeState, slot: int, *, length: int, version: int = 0
    ) -> Prefix:
        """A copy of what a slot holds: a stream of `length` tokens, the last one not read."""
        room = self.sizes.room(length - 1)
        held = self.programs.take(decode_state, self._checked_slot(slot), room=room)
        return Prefix(
            held=held, routes=(), counts=(), length=length, first=length - 1, version=version
        )

    def release(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """The state, used up, in which these slots no longer decode."""
        released_B = np.zeros(self.sizes.slots, bool)
        for slot in slots:
            released_B[self._checked_slot(slot)] = True
        return self.programs.release(decode_state, released_B)

    # ---- checks ---------------------------------------------------------------------------------

    def _row(self, draw: Draw, stop_ids: Sequence[int], left: int) -> Row:
        stops = sorted(stop_ids)
        if len(stops) > STOPS:
            raise ValueError(f"{len(stops)} stop ids; a slot has room for {STOPS}")
        unknown = [i for i in stops if not 0 <= i < self.config.vocab]
        if unknown:
            raise ValueError(
                f"stop id {unknown[0]} is no token; the vocabulary has 0..{self.config.vocab - 1}"
            )
        stops_Q = np.full(STOPS, NO_TOKEN, np.int32)
        stops_Q[: len(stops)] = stops
        settings = Settings(
            temperature_B=np.float32(draw.temperature), top_k_B=np.int32(draw.top_k),
            top_p_B=np.float32(draw.top_p), seed_B=np.uint32(draw.seed),
        )  # fmt: skip
        return Row(left=np.int32(left), stops_Q=stops_Q, settings=settings)

    def _checked_slot(self, slot: int) -> np.int32:
        if not 0 <= slot < self.sizes.slots:
            raise ValueError(f"slot {slot}; expected 0 to {self.sizes.slots - 1}")
        return np.int32(slot)

    @staticmethod
    def _refuse_sampler(sampler: Any) -> None:
        if sampler is not None:
            raise ValueError(
                "sampler= is not used: tokens are drawn inside the decode step, as `insert`'s "
                "draw= says"
            )

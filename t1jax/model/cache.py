"""What a row's past leaves behind, for continuing it: one pytree, an argument and a result."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from t1jax.model import attention, delta_net
from t1jax.model.attention import KeyValues
from t1jax.model.config import ModelConfig
from t1jax.model.delta_net import DeltaState
from t1jax.model.sharding import spec


class Cache(NamedTuple):
    """State of B rows after `length_B` tokens each.

    `layers` has one entry per layer of the repeated group, each stacked over the groups: layer l of
    the model is `layers[l % len(layers)]` at index l // len(layers).
    """

    layers: tuple[KeyValues | DeltaState, ...]
    length_B: jax.Array  # int32, tokens read so far

    @property
    def capacity(self) -> int | None:
        """Columns that each row can hold; None for a model without attention layers."""
        sizes = [x.k_BSKH.shape[2] for x in self.layers if isinstance(x, KeyValues)]
        return min(sizes, default=None)


def empty_cache(config: ModelConfig, rows: int, capacity: int, dtype: str = "bfloat16") -> Cache:
    """A cache before any token.

    Args:
      config: the model's sizes.
      rows: B.
      capacity: most tokens that a row will hold; the caller must not go past it (columns beyond
        are dropped, and `length_B` says so by exceeding the capacity).
      dtype: of keys, values and convolution columns; the recurrent state is always float32.
    """
    make = {
        "attention": lambda: attention.empty_cache(config, rows, capacity, dtype),
        "delta": lambda: delta_net.empty_state(config, rows, dtype),
    }
    layers = tuple(make[kind]() for kind in config.pattern)
    return Cache(layers, jnp.zeros(rows, jnp.int32))


def cache_shardings(config: ModelConfig, mesh: Mesh) -> Cache:
    """Where each leaf of a cache lives: rows as the tokens' rows, heads as the layers' heads."""
    at = lambda *axes: NamedSharding(mesh, spec(*axes))  # noqa: E731
    columns = at("groups", "rows", None, "kv_heads", None)
    keys, values = ("key_heads", None), ("value_heads", None)
    states: dict[str, Any] = {
        "attention": KeyValues(columns, columns),
        "delta": DeltaState(
            at("groups", "rows", None, *keys), at("groups", "rows", None, *keys),
            at("groups", "rows", None, *values), at("groups", "rows", *values, None),
        ),
    }
    return Cache(tuple(states[kind] for kind in config.pattern), at("rows"))

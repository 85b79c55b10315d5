"""Ragged all-to-all between the shards of one mesh axis: rows go where counts say.

On TPU this is `jax.lax.ragged_all_to_all`. Elsewhere that primitive does not run, and the same
exchange is made of an all-gather and a gather: more traffic, equal results, so that everything
around it is tested on CPU devices.
"""

import jax
import jax.numpy as jnp


def ragged_exchange(
    x: jax.Array, counts_SS: jax.Array, *, rows: int, axis: str, platform: str
) -> jax.Array:
    """Sends rows of `x` to the other shards and returns those received, by source shard.

    Args:
      x: [R, ...] this shard's rows, sorted by destination; the first sum(counts[me]) are sent.
      counts_SS: int32 [from, to], rows that each shard sends to each; the same on every shard.
      rows: rows of the result; at least sum(counts[:, me]).
      axis: the mesh axis, inside `shard_map`.
      platform: "tpu" selects the native primitive.

    Returns:
      [rows, ...]: received rows, those of shard 0 first; zeros after them.
    """
    me = jax.lax.axis_index(axis)
    starts_SS = jnp.cumsum(counts_SS, axis=1) - counts_SS  # in the sender's rows
    places_SS = jnp.cumsum(counts_SS, axis=0) - counts_SS  # in the receiver's rows
    if platform == "tpu":
        return jax.lax.ragged_all_to_all(
            x, jnp.zeros((rows, *x.shape[1:]), x.dtype),
            starts_SS[me], counts_SS[me], places_SS[me], counts_SS[:, me], axis_name=axis,
        )
    everyone = jax.lax.all_gather(x, axis)
    row_R = jnp.arange(rows)
    ends_S = jnp.cumsum(counts_SS[:, me])
    source_R = jnp.searchsorted(ends_S, row_R, side="right")
    within_R = row_R - places_SS[source_R, me] + starts_SS[source_R, me]
    source_R = jnp.where(row_R < ends_S[-1], source_R, everyone.shape[0])
    return everyone.at[source_R, within_R].get(mode="fill", fill_value=0)

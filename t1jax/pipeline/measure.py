"""Numbers over a whole batch that lies in several micro-batches: one jitted function each.

Micro-batches are joined before anything is averaged, so that a denominator is the global one.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from t1jax.rl import advantages, mismatch, objectives
from t1jax.rl.inputs import Batch

Parts = Sequence[jax.Array]  # [B, T] of each micro-batch


def _joined(parts: Parts) -> jax.Array:
    return jnp.concatenate([part.ravel() for part in parts])


@functools.partial(jax.jit, static_argnames=("gamma", "lam"))
def estimate(
    batch: Batch, rewards_BT: jax.Array, values_BT: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns of a micro-batch; packed episodes as if separate."""
    return advantages.generalized_advantage(
        rewards_BT, values_BT, batch.mask_BT, gamma, lam, segments=batch.segments_BT
    )


@jax.jit
def explained(values: Parts, returns: Parts, masks: Parts) -> dict[str, jax.Array]:
    """How much of the returns the values before the update explain."""
    mask = _joined(masks)
    share = advantages.explained_variance(_joined(values), _joined(returns), mask)
    mean = objectives.token_mean(_joined(values), mask)
    return {"explained_variance": share, "value_mean": mean}


@jax.jit
def whitened(parts: Parts, masks: Parts) -> list[jax.Array]:
    """Mean 0 and variance 1 over the sampled tokens of all parts together."""
    whole = advantages.moments(_joined(parts), _joined(masks))
    return [advantages.whiten(x, m, whole=whole) for x, m in zip(parts, masks, strict=True)]


@jax.jit
def gap(train: Parts, sampler: Parts, masks: Parts) -> dict[str, jax.Array]:
    """The log-prob mismatch, by its names in the recipe."""
    return mismatch.metrics(_joined(train), _joined(sampler), _joined(masks))


@functools.partial(jax.jit, static_argnames=("kind", "cap"))
def importance(
    old_BT: jax.Array, sampler_BT: jax.Array, mask_BT: jax.Array, kind: str, cap: float
) -> jax.Array:
    """Weights against the sampler's own errors: truncated at the cap, or masked beyond it."""
    if kind == "truncated":
        return objectives.truncated_importance_weights(old_BT, sampler_BT, mask_BT, cap)
    return objectives.masked_importance_weights(old_BT, sampler_BT, mask_BT, 1 / cap, cap)


penalised = jax.jit(advantages.penalised_rewards)
imbalance = jax.jit(mismatch.load_imbalance)

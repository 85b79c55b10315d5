"""How far the trainer's log-probabilities are from the sampler's, and routes from one another.

Diagnostics only: no gradient is meant to flow here. Conventions as in `objectives`.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from t1jax.rl.objectives import keep, token_count, token_mean


def metrics(
    train_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike
) -> dict[str, jax.Array]:
    """The mismatch over sampled tokens, with d = log pi_train - log pi_sampler:

    | name | formula |
    |---|---|
    | train_rollout_logprob_abs_diff | mean abs(d) |
    | k3 | mean(exp(d) - 1 - d), an estimate of KL(sampler, train) (Schulman 2020) |
    | ppl_ratio | exp(-mean d): perplexity under the trainer / under the sampler |
    | max | max abs(d) |
    | token_mult_prob_error | mean exp(abs(d)) (NeMo-RL) |
    | ESS | (sum w)^2 / (n sum w^2) with w = exp(d): the effective share of the sample, up to 1 |

    Without a single token: the values of a perfect match.
    """
    train_logprobs, sampler_logprobs = keep(mask, train_logprobs, sampler_logprobs)
    d = train_logprobs - sampler_logprobs
    return {
        "train_rollout_logprob_abs_diff": token_mean(jnp.abs(d), mask),
        "k3": token_mean(jnp.expm1(d) - d, mask),
        "ppl_ratio": jnp.exp(-token_mean(d, mask)),
        "max": jnp.max(jnp.abs(d), initial=0.0),
        "token_mult_prob_error": 1.0 + token_mean(jnp.expm1(jnp.abs(d)), mask),
        "ESS": _effective_share(d, mask),
    }


def _effective_share(d: jax.Array, mask: ArrayLike) -> jax.Array:
    """Kish's effective sample size / n; scaled by the largest weight, so that none overflows."""
    sampled = jnp.asarray(mask).astype(bool)
    largest = jnp.max(d, where=sampled, initial=-jnp.inf)
    (weights,) = keep(mask, jnp.exp(jnp.where(sampled, d - largest, 0.0)))
    count = token_count(mask)
    share = jnp.sum(weights) ** 2 / jnp.maximum(count * jnp.sum(weights**2), 1e-30)
    return jnp.where(count > 0, share, 1.0)


def replaced_rows(
    used_LBTC: jax.Array, live_LBTC: jax.Array, valid: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Per layer [L] int32: rows whose live top-K *set* is another one, and rows in all.

    Their quotient is replay_replace_rate. `valid` is [B, T], or [L, B, T] for routes of which some
    were not recorded. The order of experts within a row does not count.
    """
    counted_LBT = jnp.broadcast_to(jnp.asarray(valid).astype(bool), used_LBTC.shape[:-1])
    differs_LBT = jnp.any(jnp.sort(used_LBTC, axis=-1) != jnp.sort(live_LBTC, axis=-1), axis=-1)
    return (
        jnp.sum(differs_LBT & counted_LBT, axis=(1, 2), dtype=jnp.int32),
        jnp.sum(counted_LBT, axis=(1, 2), dtype=jnp.int32),
    )


def expert_load(used_LBTC: jax.Array, valid_BT: ArrayLike, experts: int) -> jax.Array:
    """Tokens that each expert of each layer gets, [L, E] int32; padding goes nowhere."""
    layers = used_LBTC.shape[0]
    counted = jnp.asarray(valid_BT).astype(bool)[None, :, :, None]
    ids_LR = jnp.where(counted, used_LBTC.astype(jnp.int32), experts).reshape(layers, -1)
    count = jax.vmap(lambda ids_R: jnp.bincount(ids_R, length=experts))
    return count(ids_LR).astype(jnp.int32)


def load_imbalance(load_LE: jax.Array) -> jax.Array:
    """max / mean of the experts' tokens per layer [L], float32; 1 is even."""
    load_LE = load_LE.astype(jnp.float32)
    return jnp.max(load_LE, axis=-1) / jnp.maximum(jnp.mean(load_LE, axis=-1), 1e-30)

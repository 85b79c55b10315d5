"""Losses, and what is measured beside them, as pure functions of arrays.

Arrays are [..., S]: any leading axes, then positions. Column t is about one token, and `mask` says
which columns count: those whose token the policy sampled. What stands elsewhere, NaN and -inf
included, reaches neither a result nor a gradient. Everything is float32.

A mean is over the sampled tokens of the whole batch. Where the arrays are only a part of it (a
micro-batch, or a shard inside `shard_map`), pass the whole's count as `denominator`: the losses of
the parts then add up to the loss of the whole, and so do their gradients.

Not here: shifting tokens to targets (the packing does that once), models, optimizers.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

KL_ESTIMATORS = ("k1", "k2", "k3")


def keep(mask: ArrayLike, *arrays: ArrayLike) -> tuple[jax.Array, ...]:
    """The arrays in float32 with zeros where the mask is 0, so that nothing leaks from there.

    Zeros go in before any arithmetic: 0 * NaN is NaN, in a gradient too.
    """
    kept = jnp.asarray(mask).astype(bool)
    return tuple(jnp.where(kept, jnp.asarray(x).astype(jnp.float32), 0.0) for x in arrays)


def token_count(mask: ArrayLike) -> jax.Array:
    """How many tokens count, float32: the denominator of a whole batch."""
    return jnp.sum(jnp.asarray(mask).astype(bool), dtype=jnp.int32).astype(jnp.float32)


def token_mean(x: ArrayLike, mask: ArrayLike, denominator: ArrayLike | None = None) -> jax.Array:
    """sum of x over the mask / max(denominator, 1); the mask's own count where none is given."""
    (kept,) = keep(mask, x)
    count = token_count(mask) if denominator is None else jnp.asarray(denominator, jnp.float32)
    return jnp.sum(kept) / jnp.maximum(count, 1.0)


# ---- losses --------------------------------------------------------------------------------------


def sft_loss(
    logprobs: ArrayLike, mask: ArrayLike, denominator: ArrayLike | None = None
) -> jax.Array:
    """Negative log-likelihood, mean over sampled tokens: -mean log pi(a|s)."""
    return -token_mean(logprobs, mask, denominator)


def clipped_policy_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip: float,
    *,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
) -> jax.Array:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), negated:

        -mean min(r A, clip(r, 1 - clip, 1 + clip) A),    r = exp(logprobs - old_logprobs)

    Computed as A exp(min(d, log(1 + clip))) for A >= 0 and A exp(max(d, log(1 - clip))) for A < 0,
    with d = log r. That is the same number, but an exp that overflows on the side which the clip
    cuts off cannot make the gradient NaN (inf * 0).

    Args:
      logprobs: of the policy being trained; the gradient flows through these alone.
      old_logprobs: the trainer's, under the rollout's weights and routes; never the sampler's.
      advantages: of each sampled token.
      mask: nonzero where a token counts.
      clip: in (0, 1); 0.2 in the recipe.
      weights: factors per token, see `truncated_importance_weights`; none if not given.
      denominator: see the module.
    """
    _refuse_clip(clip)
    logprobs, old_logprobs, advantages = keep(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - jax.lax.stop_gradient(old_logprobs)
    log_capped = jnp.where(
        advantages >= 0,
        jnp.minimum(log_ratio, jnp.log1p(jnp.float32(clip))),
        jnp.maximum(log_ratio, jnp.log1p(-jnp.float32(clip))),
    )
    gain = jnp.exp(log_capped) * jax.lax.stop_gradient(advantages)
    if weights is not None:
        gain = gain * jax.lax.stop_gradient(keep(mask, weights)[0])
    return -token_mean(gain, mask, denominator)


def clipped_value_loss(
    values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    mask: ArrayLike,
    clip: float,
    *,
    denominator: ArrayLike | None = None,
) -> jax.Array:
    """The larger of the plain and the clipped squared error, mean over sampled tokens:

        mean max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    As in the authors' baselines (openai/baselines ppo2), around the critic's value before the
    update. There is no factor 1/2, as in the recipe.
    """
    if not clip > 0:
        raise ValueError(f"value clip={clip}; expected a positive number, such as 0.2")
    values, old_values, returns = keep(mask, values, old_values, returns)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    capped = old_values + jnp.clip(values - old_values, -clip, clip)
    error = jnp.maximum((values - returns) ** 2, (capped - returns) ** 2)
    return token_mean(error, mask, denominator)


def kl_divergence(
    logprobs: ArrayLike,
    reference_logprobs: ArrayLike,
    mask: ArrayLike,
    estimator: str = "k3",
    *,
    denominator: ArrayLike | None = None,
) -> jax.Array:
    """KL(policy || reference) from tokens that the policy sampled (Schulman 2020,
    http://joschu.net/blog/kl-approx.html), with d = log policy - log reference:

        k1 = d  (unbiased)     k2 = d^2 / 2     k3 = exp(-d) - 1 + d  (unbiased, never negative)

    As a loss: the gradient of the estimate is not the estimate of the gradient. k2's is right on
    average for this KL; k1's is zero on average; k3's is that of KL(reference || policy).
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {estimator!r}; expected one of {KL_ESTIMATORS}")
    logprobs, reference_logprobs = keep(mask, logprobs, reference_logprobs)
    d = logprobs - jax.lax.stop_gradient(reference_logprobs)
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = d**2 / 2
    else:
        estimate = jnp.expm1(-d) + d
    return token_mean(estimate, mask, denominator)


def entropy(logits: ArrayLike) -> jax.Array:
    """-sum p log p over the last axis, in nats, float32; a logit of -inf adds nothing."""
    logprobs = jax.nn.log_softmax(jnp.asarray(logits).astype(jnp.float32), axis=-1)
    possible = logprobs > -jnp.inf
    safe = jnp.where(possible, logprobs, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(safe) * safe, 0.0), axis=-1)


# ---- correction for the sampler's own errors -----------------------------------------------------


def truncated_importance_weights(
    old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike, cap: float
) -> jax.Array:
    """TIS: min(pi_old / pi_sampler, cap) per token, constant for the gradient, 0 off the mask.

    Corrects for tokens that an engine drew from slightly other probabilities than the trainer's
    at the same weights (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl).
    """
    if not cap > 0:
        raise ValueError(f"importance cap={cap}; expected a positive number, such as 2.0")
    return _ratio(old_logprobs, sampler_logprobs, mask, -jnp.inf, jnp.log(jnp.float32(cap)))


def masked_importance_weights(
    old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike, low: float, high: float
) -> jax.Array:
    """pi_old / pi_sampler where it lies within [low, high], else 0: such a token is left out.

    The variant of IcePop (Ling team 2025, arXiv 2510.18855). The denominator of the loss still
    counts the tokens left out.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"importance bounds [{low}, {high}]; expected 0 <= low <= 1 <= high")
    weights = _ratio(old_logprobs, sampler_logprobs, mask, -jnp.inf, jnp.inf)
    return jnp.where((weights >= low) & (weights <= high), weights, 0.0)


def _ratio(
    logprobs: ArrayLike, others: ArrayLike, mask: ArrayLike, least: ArrayLike, most: ArrayLike
) -> jax.Array:
    logprobs, others = keep(mask, logprobs, others)
    ratio = jnp.exp(jnp.clip(logprobs - others, least, most))
    return jax.lax.stop_gradient(jnp.where(jnp.asarray(mask).astype(bool), ratio, 0.0))


# ---- measurements --------------------------------------------------------------------------------


def clip_fraction(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip: float,
    *,
    denominator: ArrayLike | None = None,
) -> jax.Array:
    """The share of sampled tokens whose gradient the policy clip removes."""
    _refuse_clip(clip)
    logprobs, old_logprobs, advantages = keep(mask, logprobs, old_logprobs, advantages)
    d = logprobs - old_logprobs
    too_high = (advantages > 0) & (d > jnp.log1p(jnp.float32(clip)))
    too_low = (advantages < 0) & (d < jnp.log1p(-jnp.float32(clip)))
    return token_mean(too_high | too_low, mask, denominator)


def _refuse_clip(clip: float) -> None:
    if not 0 < clip < 1:
        raise ValueError(f"policy clip={clip}; expected a number between 0 and 1, such as 0.2")

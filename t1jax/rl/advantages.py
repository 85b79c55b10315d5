"""Advantages and returns of sampled tokens, and moments over a whole batch, as pure functions.

Arrays are [..., S] with the conventions of `objectives`: the mask marks sampled tokens, what stands
elsewhere leaks nowhere, float32. The value in column t is that of the state in which column t's
token was chosen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from t1jax.rl.objectives import keep, token_count

ROUNDING = 1e-6  # of a float32 mean over many tokens, relative


@functools.partial(jax.jit, static_argnames=("gamma", "lam"))
def generalized_advantage(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    gamma: float,
    lam: float,
    *,
    segments: ArrayLike | None = None,
    bootstrap: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """GAE (Schulman et al. 2015, arXiv 1506.02438, eq. 16) along the sampled tokens alone:

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next

    where `next` is the next *sampled* token of the same episode and 0 beyond the last: a tool's
    output has no value, takes no step of gamma, and does not break the chain. Returns are A + V.

    Args:
      rewards: of each sampled token; a reward elsewhere counts for nothing.
      values: V of the state before each sampled token.
      mask: nonzero where the token was sampled.
      gamma: discount.
      lam: lambda.
      segments: packing, episode ids [..., S]; None: a row is one episode.
      bootstrap: value [..., S] of the state after an episode's last sampled token, at that token;
        None: nothing follows, for truncated episodes too (the recipe).

    Returns:
      advantages and returns [..., S], 0 where the mask is 0.
    """
    sampled = jnp.asarray(mask).astype(bool)
    rewards, values = keep(mask, rewards, values)
    joined = _joined_to_next(sampled.shape, segments)
    first_value = _accumulate_back(jnp.where(joined & ~sampled, 1.0, 0.0), values)
    next_value = jnp.where(joined, _shifted_back(first_value), 0.0)
    if bootstrap is not None:
        last = last_sampled(mask, segments)
        next_value = jnp.where(last, keep(last, bootstrap)[0], next_value)
    delta = jnp.where(sampled, rewards + gamma * next_value - values, 0.0)
    decay = jnp.where(joined, jnp.where(sampled, gamma * lam, 1.0), 0.0)
    (advantages,) = keep(mask, _accumulate_back(decay.astype(jnp.float32), delta))
    return advantages, jnp.where(sampled, advantages + values, 0.0)


@jax.jit
def last_sampled(mask: ArrayLike, segments: ArrayLike | None = None) -> jax.Array:
    """True at the last sampled token of each episode: where its reward belongs."""
    sampled = jnp.asarray(mask).astype(bool)
    joined = _joined_to_next(sampled.shape, segments)
    decay, ones = joined.astype(jnp.float32), sampled.astype(jnp.float32)
    later = jnp.where(joined, _shifted_back(_accumulate_back(decay, ones)), 0.0)
    return sampled & (later == 0)


def penalised_rewards(
    rewards: ArrayLike,
    logprobs: ArrayLike,
    reference_logprobs: ArrayLike,
    mask: ArrayLike,
    coefficient: float,
) -> jax.Array:
    """r - coefficient (log policy - log reference) per sampled token (Ouyang et al. 2022,
    arXiv 2203.02155, eq. 2): the KL penalty as a reward. 0 off the mask."""
    rewards, logprobs, reference_logprobs = keep(mask, rewards, logprobs, reference_logprobs)
    return rewards - coefficient * (logprobs - reference_logprobs)


def _joined_to_next(shape: tuple[int, ...], segments: ArrayLike | None) -> jax.Array:
    """Whether column t and column t + 1 are of one episode; False in the last column."""
    inner = jnp.ones((*shape[:-1], shape[-1] - 1), bool)
    if segments is not None:
        segments = jnp.asarray(segments)
        inner = segments[..., 1:] == segments[..., :-1]
    return jnp.concatenate([inner, jnp.zeros((*shape[:-1], 1), bool)], axis=-1)


def _shifted_back(x: jax.Array) -> jax.Array:
    """Column t + 1 in column t; 0 in the last."""
    return jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)


def _accumulate_back(decay: jax.Array, x: jax.Array) -> jax.Array:
    """y_t = x_t + decay_t y_{t+1}, in log(S) steps: rows may be long, and split over devices."""

    def compose(later, earlier):
        decay_later, x_later = later
        decay_earlier, x_earlier = earlier
        return decay_earlier * decay_later, x_earlier + decay_earlier * x_later

    return jax.lax.associative_scan(compose, (decay, x), reverse=True, axis=x.ndim - 1)[1]


# ---- moments of a whole batch --------------------------------------------------------------------


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of the tokens that count; parts merge exactly."""

    tokens: jax.Array
    mean: jax.Array
    squares: jax.Array  # sum of (x - mean)^2

    @property
    def variance(self) -> jax.Array:
        """Of the population: squares / tokens; 0 where nothing was counted."""
        return self.squares / jnp.maximum(self.tokens, 1.0)

    @property
    def constant(self) -> jax.Array:
        """True where the tokens differ by no more than the rounding of their mean."""
        return jnp.sqrt(self.variance) <= ROUNDING * jnp.abs(self.mean)


def moments(x: ArrayLike, mask: ArrayLike) -> Moments:
    """Moments over the mask, in two passes: squares of deviations do not cancel."""
    (kept,) = keep(mask, x)
    count = token_count(mask)
    mean = jnp.sum(kept) / jnp.maximum(count, 1.0)
    return Moments(count, mean, jnp.sum(keep(mask, kept - mean)[0] ** 2))


def merge(one: Moments, other: Moments) -> Moments:
    """Moments of both sets of tokens together (Chan, Golub and LeVeque 1979)."""
    count = one.tokens + other.tokens
    share = other.tokens / jnp.maximum(count, 1.0)
    apart = other.mean - one.mean
    squares = one.squares + other.squares + apart**2 * one.tokens * share
    return Moments(count, one.mean + apart * share, squares)


def whiten(
    x: ArrayLike, mask: ArrayLike, *, whole: Moments | None = None, epsilon: float = 1e-8
) -> jax.Array:
    """(x - mean) / (std + epsilon) over sampled tokens, 0 off the mask and where all are equal.

    `whole` are the moments of the whole batch, where x is only a part of it.
    """
    whole = moments(x, mask) if whole is None else whole
    (kept,) = keep(mask, x)
    white = (kept - whole.mean) / (jnp.sqrt(whole.variance) + epsilon)
    return keep(mask, jnp.where(whole.constant, 0.0, white))[0]


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> jax.Array:
    """1 - Var[R - V] / Var[R] over the sampled tokens of the whole batch.

    1 is a perfect critic, 0 one that says nothing. NaN where all returns are equal: undefined.
    """
    values, returns = keep(mask, values, returns)
    return explained(moments(returns - values, mask), moments(returns, mask))


def explained(residuals: Moments, returns: Moments) -> jax.Array:
    """`explained_variance` from moments that were merged over parts of a batch."""
    share = residuals.squares / jnp.where(returns.constant, 1.0, returns.squares)
    return jnp.where(returns.constant, jnp.nan, 1.0 - share)

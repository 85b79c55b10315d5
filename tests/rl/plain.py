"""The formulas of t1jax.rl once more: float64 numpy, one Python loop per token, nothing shared."""

import math

import numpy as np


def tokens(mask, *arrays):
    """Yields the numbers of each token that counts."""
    for at in np.ndindex(mask.shape):
        if mask[at]:
            yield tuple(float(x[at]) for x in arrays)


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / max(len(numbers), 1)


def policy_loss(new, old, advantages, mask, clip):
    def gain(n, o, a):
        ratio = math.exp(n - o)
        return min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)

    return -mean(gain(*x) for x in tokens(mask, new, old, advantages))


def value_loss(values, old, returns, mask, clip):
    def error(v, o, r):
        clipped = o + min(max(v - o, -clip), clip)
        return max((v - r) ** 2, (clipped - r) ** 2)

    return mean(error(*x) for x in tokens(mask, values, old, returns))


def sft_loss(logprobs, mask):
    return -mean(x for (x,) in tokens(mask, logprobs))


def kl(new, reference, mask, estimator):
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }[estimator]
    return mean(formula(n - r) for n, r in tokens(mask, new, reference))


def clip_fraction(new, old, advantages, mask, clip):
    """Where the clipped term is strictly the smaller one."""
    def clipped(n, o, a):
        ratio = math.exp(n - o)
        return min(max(ratio, 1 - clip), 1 + clip) * a < ratio * a

    return mean(clipped(*x) for x in tokens(mask, new, old, advantages))


def advantage(rewards, values, mask, gamma, lam, segments=None):
    """GAE of each episode by itself: its sampled tokens are taken out, and put back after."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        ids = np.ones(mask.shape[1]) if segments is None else segments[row]
        for episode in np.unique(ids):
            columns = [t for t in range(mask.shape[1]) if mask[row, t] and ids[t] == episode]
            following = next_value = 0.0
            for t in reversed(columns):
                delta = float(rewards[row, t]) + gamma * next_value - float(values[row, t])
                following = delta + gamma * lam * following
                next_value = float(values[row, t])
                advantages[row, t], returns[row, t] = following, following + next_value
    return advantages, returns


def mismatch(train, sampler, mask):
    d = [t - s for t, s in tokens(mask, train, sampler)]
    weights = [math.exp(x) for x in d]
    return {
        "train_rollout_logprob_abs_diff": mean(abs(x) for x in d),
        "k3": mean(math.exp(x) - 1 - x for x in d),
        "ppl_ratio": math.exp(-mean(t for t, _ in tokens(mask, train, sampler)))
        / math.exp(-mean(s for _, s in tokens(mask, train, sampler))),
        "max": max(abs(x) for x in d),
        "token_mult_prob_error": mean(math.exp(abs(x)) for x in d),
        "ESS": sum(weights) ** 2 / (len(d) * sum(w * w for w in weights)),
    }


def finite_difference(function, x, at, step=1e-6):
    """Central difference of a float64 scalar function in one entry."""
    up, down = x.copy(), x.copy()
    up[at] += step
    down[at] -= step
    return (function(up) - function(down)) / (2 * step)

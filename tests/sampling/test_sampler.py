"""Draws follow the distribution that was asked for, and say with which probability."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.sampling import sampler

LOGITS = np.log(np.array([0.05, 0.5, 0.15, 0.3]))  # unsorted on purpose


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    full = lambda value, dtype: jnp.asarray(np.broadcast_to(value, rows), dtype)  # noqa: E731
    return sampler.Settings(
        temperature_B=full(temperature, "float32"), top_k_B=full(top_k, "int32"),
        top_p_B=full(top_p, "float32"), seed_B=full(seed, "uint32"),
    )  # fmt: skip


def many(logits, count, **asked):
    """Draws at positions 0, 1, ... of one sequence, and their log-probs, as numpy."""

    @jax.jit
    def run(position_N):
        row = settings(1, **asked)
        one = lambda t: sampler.draw(jnp.asarray(logits, "float32")[None], t[None], row)  # noqa: E731
        return jax.tree.map(lambda x: x[:, 0], jax.vmap(one)(position_N))

    return jax.tree.map(np.asarray, run(jnp.arange(count)))


def exact(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution drawn from, written as a loop over tokens in float64."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda v: (-p[v], v))
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(p[v] for v in order), 0.0, []
    for v in order:
        if top_p < 1 and mass / total >= top_p:
            break
        kept.append(v)
        mass += p[v]
    return np.array([p[v] / mass if v in kept else 0.0 for v in range(len(p))])


@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 1.5, "top_p": 0.5},
     {"temperature": 0.6, "top_k": 20, "top_p": 0.8}],
    ids=str,
)  # fmt: skip
def test_50_000_draws_follow_the_exact_probabilities(asked):
    """Chi-square: an average near its degrees of freedom; 5 standard deviations are refused."""
    logits = np.random.default_rng(1).normal(size=40) * 2
    drawn = many(logits, 50_000, **asked)
    p = exact(logits, **asked)
    seen = np.bincount(drawn.token_B, minlength=40)
    assert np.all(seen[p == 0] == 0)
    rare = (p > 0) & (p * 50_000 < 5)  # pooled, as the test asks
    expected = np.append(p[(p > 0) & ~rare], p[rare].sum()) * 50_000
    got = np.append(seen[(p > 0) & ~rare], seen[rare].sum())
    expected, got = expected[expected > 0], got[expected > 0]
    freedom = len(expected) - 1
    statistic = np.sum((got - expected) ** 2 / expected)
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * max(freedom, 1))
    np.testing.assert_allclose(drawn.filtered_logprob_B, np.log(p[drawn.token_B]), atol=2e-5)


def test_raw_and_filtered_log_probs_of_top_p():
    drawn = many(LOGITS, 50, top_p=0.9)
    likeliest = drawn.token_B == 1
    np.testing.assert_allclose(drawn.raw_logprob_B[likeliest], -0.6931, atol=1e-4)
    np.testing.assert_allclose(drawn.filtered_logprob_B[likeliest], -0.5978 + -0.0441, atol=1e-4)
    assert 0 not in drawn.token_B


def test_raw_log_probs_are_under_the_temperature():
    drawn = many([2.0, 1.0, 0.0], 50, temperature=0.6)
    np.testing.assert_allclose(drawn.raw_logprob_B[drawn.token_B == 0], -0.2026, atol=1e-4)


def test_temperature_0_takes_the_likeliest_and_reports_temperature_1():
    drawn = many([1.0, 3.0, 3.0, 2.0], 20, temperature=0.0, top_p=0.5)
    assert set(drawn.token_B) == {1}  # the lower id of two equals
    expected = 3 - np.log(np.exp([1.0, 3, 3, 2]).sum())
    np.testing.assert_allclose(drawn.raw_logprob_B, expected, atol=1e-5)
    assert np.all(drawn.filtered_logprob_B == 0)


def test_a_row_is_drawn_the_same_whoever_shares_its_batch():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(16, 300)), "float32")
    seeds, places = rng.integers(0, 2**32, 16), jnp.asarray(rng.integers(0, 9999, 16), "int32")
    asked = {
        "temperature": [0, 0.6, 1, 1] * 4,
        "top_k": [0, 0, 9, 0] * 4,
        "top_p": [1, 1, 1, 0.8] * 4,
    }
    run = jax.jit(sampler.draw)
    together = run(logits, places, settings(16, seed=seeds, **asked))
    for row in range(16):
        mine = {name: values[row] for name, values in asked.items()}
        one = slice(row, row + 1)
        alone = run(logits[one], places[one], settings(1, seed=seeds[row], **mine))
        assert alone.token_B[0] == together.token_B[row]
        np.testing.assert_allclose(alone.raw_logprob_B[0], together.raw_logprob_B[row], atol=1e-6)


def test_seed_and_position_change_the_draw():
    flat = np.zeros(1000)
    tokens = functools.partial(many, flat, 20)
    first = tokens(seed=1).token_B
    np.testing.assert_array_equal(first, tokens(seed=1).token_B)
    assert len(set(first)) > 15 and np.any(first != tokens(seed=2).token_B)


def test_impossible_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0])
    for asked in ({}, {"top_k": 3}, {"top_p": 0.99}):
        drawn = many(logits, 2000, **asked)
        assert set(drawn.token_B) == {1, 3}
        np.testing.assert_allclose(drawn.raw_logprob_B, np.log(0.5), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"temperature": -0.1}, r"temperature=-0.1; expected 0 \(greedy\) or more"),
     ({"temperature": float("nan")}, "temperature=nan"),
     ({"top_p": 0.0}, "top_p=0.0; expected above 0 and at most 1"),
     ({"top_k": -1}, "top_k=-1"), ({"seed": 2**32}, "seed=4294967296; expected from 0")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        sampler.check(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0} | wrong)

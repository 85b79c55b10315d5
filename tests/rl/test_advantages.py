"""GAE over sampled tokens, whitening and explained variance: literals and plain float64 loops."""

import jax
import numpy as np
import pytest

from t1jax.rl import advantages as A

from . import plain, ragged


def test_gae_of_the_recipes_first_example():
    got, returns = A.generalized_advantage(
        np.array([[0.0, 1, 0]]), np.array([[0.0, 0, 100]]), np.array([[1, 1, 0]]), 1.0, 0.95
    )
    np.testing.assert_allclose(got, [[0.95, 1, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0.95, 1, 0]], rtol=1e-6)


def test_gae_of_the_recipes_second_example():
    mask = np.array([[1, 1, 0, 0, 1, 1]])
    values = np.array([[0.1, 0.2, 9, 9, 0.3, 0.4]])
    rewards = np.array([[0, 0, 0, 0, 0, 0.6]])
    got, _ = A.generalized_advantage(rewards, values, mask, 0.99, 0.95)
    np.testing.assert_allclose(got, [[0.4405, 0.3642, 0, 0, 0.2841, 0.2]], atol=5e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_plain_float64_episode_by_episode(gamma, lam):
    for seed in range(3):
        mask, segments, clean = ragged.batch(seed)
        rewards, values = (ragged.poisoned(clean[k], mask) for k in ("rewards", "values"))
        for ids in (None, segments):
            got = A.generalized_advantage(rewards, values, mask, gamma, lam, segments=ids)
            want = plain.advantage(clean["rewards"], clean["values"], mask, gamma, lam, ids)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert got[0].dtype == got[1].dtype == np.float32
            assert not np.any(np.asarray(got)[:, ~mask])


def test_packed_episodes_have_the_advantages_they_have_apart():
    rng = np.random.default_rng(0)
    lengths = (5, 1, 8)
    rows = [(rng.normal(size=n), rng.normal(size=n), rng.random(n) < 0.7) for n in lengths]
    packed = [np.concatenate(x)[None] for x in zip(*rows, strict=True)]
    ids = np.repeat([1, 2, 3], lengths)[None]
    got = A.generalized_advantage(*packed, 0.99, 0.95, segments=ids)
    apart = [A.generalized_advantage(r[None], v[None], m[None], 0.99, 0.95) for r, v, m in rows]
    for one, parts in zip(got, zip(*apart, strict=True), strict=True):
        np.testing.assert_allclose(one, np.concatenate(parts, axis=1), rtol=1e-5, atol=1e-6)


def test_three_of_five_assertions_arrive_as_float32():
    got, returns = A.generalized_advantage(
        np.array([[0, 0, 3 / 5]]), np.zeros((1, 3), np.int32), np.ones((1, 3), int), 1.0, 1.0
    )
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.full((1, 3), 0.6), rtol=1e-7)
    np.testing.assert_allclose(returns, got)


def test_last_sampled_is_per_episode_and_skips_tool_output():
    mask = np.array([[1, 1, 0, 0, 1, 0, 0, 0, 0], [0] * 9])  # the row ends in tool output
    segments = np.array([[1, 1, 1, 2, 2, 2, 3, 3, 0], [0] * 9])
    want = np.zeros((2, 9), bool)
    want[0, [1, 4]] = True  # episode 3 has no sampled token
    np.testing.assert_array_equal(A.last_sampled(mask, segments), want)
    want[0, 1] = False
    np.testing.assert_array_equal(A.last_sampled(mask), want)


def test_bootstrap_adds_the_value_beyond_a_truncated_episode():
    mask = np.array([[1, 0, 1, 0, 1, 1]])
    segments = np.array([[1, 1, 1, 1, 2, 2]])
    zeros = np.zeros((1, 6))
    beyond = np.array([[np.nan, np.nan, 10, np.nan, np.nan, 0.0]])
    got, _ = A.generalized_advantage(
        zeros, zeros, mask, 0.5, 1.0, segments=segments, bootstrap=beyond
    )
    np.testing.assert_allclose(got, [[2.5, 0, 5, 0, 0, 0]])


def test_a_long_row_keeps_its_sum():
    """86,016 tokens under one reward, gamma and lambda 1: every advantage is R - V."""
    rng = np.random.default_rng(1)
    values, rewards = rng.normal(size=(1, 86016)), np.zeros((1, 86016))
    rewards[0, -1] = 0.6
    got, returns = A.generalized_advantage(rewards, values, np.ones((1, 86016)), 1.0, 1.0)
    np.testing.assert_allclose(got, 0.6 - values, atol=2e-5)
    np.testing.assert_allclose(returns, np.full_like(values, 0.6), atol=2e-5)


def test_kl_penalty_as_a_reward():
    mask = np.array([[1, 0, 1]])
    policy = np.array([[-1.0, np.nan, -2.0]])
    reference = np.array([[-1.5, -np.inf, -1.0]])
    got = A.penalised_rewards(np.array([[0.0, 9, 1]]), policy, reference, mask, 0.1)
    np.testing.assert_allclose(got, [[-0.05, 0, 1.1]], rtol=1e-6)


def test_whitening_has_mean_zero_and_deviation_one_over_sampled_tokens():
    mask, _, clean = ragged.batch(2)
    got = np.asarray(A.whiten(ragged.poisoned(clean["returns"], mask), mask), np.float64)
    kept = clean["returns"][mask]
    np.testing.assert_allclose(got[mask], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-5)
    assert not np.any(got[~mask])


@pytest.mark.parametrize("count", [0, 1, 4, 999])
@pytest.mark.parametrize("value", [0.0, 0.3, 0.1, -7e4])
def test_whitening_no_token_one_token_and_equal_tokens_gives_zeros(count, value):
    """A mean of equal numbers may round; that rounding is not blown up to a deviation of 1."""
    mask = np.arange(1000)[None] < count
    got = A.whiten(np.where(mask, value, np.nan), mask)
    np.testing.assert_array_equal(got, np.zeros((1, 1000)))


def test_moments_of_parts_merge_to_those_of_the_whole():
    mask, _, clean = ragged.batch(3)
    x = clean["returns"] + 50.0  # far from 0: a sum of squares would cancel
    merged = A.moments(x[:0], mask[:0])
    for row in range(len(x)):
        merged = A.merge(merged, A.moments(x[row], mask[row]))
    np.testing.assert_allclose(merged.mean, x[mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(merged.variance, x[mask].var(), rtol=1e-4)
    whole = A.whiten(x, mask)
    parts = [A.whiten(x[i], mask[i], whole=merged) for i in range(len(x))]
    np.testing.assert_allclose(np.stack(parts), whole, rtol=1e-3, atol=1e-4)


def test_explained_variance_of_perfect_silent_and_random_critics():
    mask, _, clean = ragged.batch(5)
    returns, values = clean["returns"], clean["values"]
    poisoned = [ragged.poisoned(x, mask, i) for i, x in enumerate((values, returns))]
    want = 1 - (returns - values)[mask].var() / returns[mask].var()
    np.testing.assert_allclose(A.explained_variance(*poisoned, mask), want, rtol=1e-4)
    assert float(A.explained_variance(poisoned[1], poisoned[1], mask)) == 1
    constant = np.full_like(returns, 0.7)
    np.testing.assert_allclose(A.explained_variance(constant, poisoned[1], mask), 0, atol=1e-5)
    assert np.isnan(A.explained_variance(values, constant, mask))  # undefined, not -inf
    assert np.isnan(A.explained_variance(values, returns, np.zeros_like(mask)))


def test_advantages_split_over_devices_equal_the_whole():
    mask, segments, clean = ragged.batch(6, rows=4, columns=32)
    arrays = [x.astype(np.float32) for x in (clean["rewards"], clean["values"])]
    mesh = jax.make_mesh((2, 4), ("rows", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "context"))
    run = jax.jit(
        lambda r, v, m, s: A.generalized_advantage(r, v, m, 0.99, 0.95, segments=s)
    )
    want = run(*arrays, mask, segments)
    got = run(*(jax.device_put(x, put) for x in (*arrays, mask, segments)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

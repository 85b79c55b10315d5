"""Losses and metrics against plain float64 loops, finite differences, and worked examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.rl import mismatch, objectives

from . import plain, ragged

LOSSES = {
    "policy": (
        lambda x, b, mask, **k: objectives.clipped_policy_loss(
            x, b["old"], b["advantages"], mask, 0.2, **k
        ),
        lambda x, b, mask: plain.policy_loss(x, b["old"], b["advantages"], mask, 0.2),
        "new",
    ),
    "value": (
        lambda x, b, mask, **k: objectives.clipped_value_loss(
            x, b["old_values"], b["returns"], mask, 0.2, **k
        ),
        lambda x, b, mask: plain.value_loss(x, b["old_values"], b["returns"], mask, 0.2),
        "values",
    ),
    "sft": (
        lambda x, b, mask, **k: objectives.sft_loss(x, mask, **k),
        lambda x, b, mask: plain.sft_loss(x, mask),
        "new",
    ),
} | {
    f"kl {name}": (
        lambda x, b, mask, name=name, **k: objectives.kl_divergence(x, b["old"], mask, name, **k),
        lambda x, b, mask, name=name: plain.kl(x, b["old"], mask, name),
        "new",
    )
    for name in objectives.KL_ESTIMATORS
}


def dirty(arrays, mask):
    return {name: ragged.poisoned(x, mask, i) for i, (name, x) in enumerate(arrays.items())}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_plain_float64_whatever_stands_off_the_mask(name):
    ours, theirs, of = LOSSES[name]
    for seed in range(3):
        mask, _, clean = ragged.batch(seed)
        with_poison = dirty(clean, mask)
        loss, gradient = jax.value_and_grad(ours)(
            jnp.asarray(with_poison[of]), with_poison, jnp.asarray(mask)
        )
        np.testing.assert_allclose(loss, theirs(clean[of], clean, mask), rtol=2e-5)
        for at in np.ndindex(mask.shape):
            want = plain.finite_difference(
                lambda x, b=clean, m=mask: theirs(x, b, m), clean[of], at
            )
            np.testing.assert_allclose(gradient[at], want, rtol=2e-4, atol=2e-6, err_msg=str(at))
        assert not np.any(np.asarray(gradient)[~mask])


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_under_the_whole_batch_denominator(name):
    ours, _, of = LOSSES[name]
    mask, _, clean = ragged.batch(4, rows=4, columns=6)
    mask = np.arange(6) < np.array([[3], [1], [5], [2]])  # lengths 3, 1, 5, 2
    arrays = {key: x.astype(np.float32) for key, x in clean.items()}
    whole = jax.grad(ours)(jnp.asarray(arrays[of]), arrays, mask)
    count = objectives.token_count(mask)
    parts = [
        jax.grad(ours)(
            jnp.asarray(arrays[of][i : i + 1]),
            {key: x[i : i + 1] for key, x in arrays.items()},
            mask[i : i + 1],
            denominator=count,
        )
        for i in range(4)
    ]
    assert float(count) == 11
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6, atol=1e-9)


def test_no_sampled_token_gives_zero_loss_and_zero_gradient():
    mask, _, clean = ragged.batch(0)
    nothing = np.zeros_like(mask)
    with_poison = dirty(clean, nothing)
    for ours, _, of in LOSSES.values():
        loss, gradient = jax.value_and_grad(ours)(
            jnp.asarray(with_poison[of]), with_poison, nothing
        )
        assert float(loss) == 0
        assert not np.any(np.asarray(gradient))


def test_ratio_is_exactly_one_at_the_old_policy():
    logprobs = jnp.asarray([[-0.1, -7.3, -1e-8, 0.0]])
    advantages, mask = jnp.asarray([[1.0, 2.0, 4.0, 8.0]]), jnp.ones((1, 4), bool)
    loss, gradient = jax.value_and_grad(objectives.clipped_policy_loss)(
        logprobs, logprobs, advantages, mask, 0.2
    )
    assert float(loss) == -15 / 4  # a log-probability of exactly 0 counts too
    np.testing.assert_array_equal(gradient, -advantages / 4)


def test_an_overflowing_ratio_on_the_clipped_side_costs_nothing_and_has_no_gradient():
    new, old = jnp.asarray([[0.0, -1.0]]), jnp.asarray([[-200.0, -1.0]])
    loss, gradient = jax.value_and_grad(objectives.clipped_policy_loss)(
        new, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool), 0.2
    )
    np.testing.assert_allclose(loss, -(1.2 + 1) / 2, rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[0, -0.5]])


def test_which_kl_each_estimators_gradient_belongs_to():
    """Over all four tokens of a policy, weighted by their probability: an exact expectation."""
    theta = jnp.asarray([0.5, -1.0, 0.2, 1.3])
    reference = jax.nn.log_softmax(jnp.asarray([-0.3, 0.4, 1.0, 0.1]))
    chances = jax.nn.softmax(theta)

    def expected_gradient(estimator):
        def one(theta, token):
            logprob = jax.nn.log_softmax(theta)[token]
            return objectives.kl_divergence(logprob, reference[token], True, estimator)

        return chances @ jax.vmap(jax.grad(one), (None, 0))(theta, jnp.arange(4))

    def kl(theta, forward):
        logprobs = jax.nn.log_softmax(theta)
        p, q = (logprobs, reference) if forward else (reference, logprobs)
        return jnp.sum(jnp.exp(p) * (p - q))

    gradients = {name: expected_gradient(name) for name in objectives.KL_ESTIMATORS}
    np.testing.assert_allclose(gradients["k1"], np.zeros(4), atol=1e-6)
    np.testing.assert_allclose(gradients["k2"], jax.grad(kl)(theta, True), atol=1e-6)
    np.testing.assert_allclose(gradients["k3"], jax.grad(kl)(theta, False), atol=1e-6)


def test_clip_fraction_counts_tokens_whose_gradient_the_clip_removes():
    for seed in range(3):
        mask, _, clean = ragged.batch(seed)
        b = dirty(clean, mask)
        got = objectives.clip_fraction(b["new"], b["old"], b["advantages"], mask, 0.2)
        want = plain.clip_fraction(clean["new"], clean["old"], clean["advantages"], mask, 0.2)
        assert 0.05 < want < 0.5
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_importance_weights_truncate_or_leave_out():
    ratios = np.array([[0.2, 0.5, 1.0, 1.9, 2.0, 7.0, 1.0]])
    sampler = np.full_like(ratios, -3.0)
    mask = np.array([[1, 1, 1, 1, 1, 1, 0]])
    old = ragged.poisoned(sampler + np.log(ratios), mask)
    truncated = objectives.truncated_importance_weights(old, sampler, mask, 2.0)
    np.testing.assert_allclose(truncated, [[0.2, 0.5, 1, 1.9, 2, 2, 0]], rtol=1e-6)
    left = objectives.masked_importance_weights(old, sampler, mask, 0.3, 1.95)
    np.testing.assert_allclose(left, [[0, 0.5, 1, 1.9, 0, 0, 0]], rtol=1e-6)


def test_importance_weights_scale_each_token_and_carry_no_gradient():
    mask, _, clean = ragged.batch(1)
    b = {key: x.astype(np.float32) for key, x in clean.items()}

    def loss(new, weighted_by, truncate=True):
        weights = jnp.exp(weighted_by - b["old"])
        if truncate:
            weights = objectives.truncated_importance_weights(weighted_by, b["old"], mask, 2.0)
        return objectives.clipped_policy_loss(
            new, b["old"], b["advantages"], mask, 0.2, weights=weights
        )

    plainly = jax.grad(objectives.clipped_policy_loss)(
        b["new"], b["old"], b["advantages"], mask, 0.2
    )
    by_new, by_weights = jax.grad(loss, argnums=(0, 1))(b["new"], b["new"])
    weights = np.minimum(np.exp(clean["new"] - clean["old"]), 2.0)
    np.testing.assert_allclose(by_new, plainly * weights, rtol=1e-5, atol=1e-9)
    assert not np.any(np.asarray(by_weights))
    assert not np.any(np.asarray(jax.grad(loss, argnums=1)(b["new"], b["new"], False)))


def test_entropy_of_known_distributions():
    logits = np.log([[0.5, 0.3, 0.15, 0.05], [1, 1, 1, 1], [1, 1, 1e-300, 1e-300]])
    logits[2, 2:] = -np.inf
    want = [-sum(p * np.log(p) for p in (0.5, 0.3, 0.15, 0.05)), np.log(4), np.log(2)]
    np.testing.assert_allclose(objectives.entropy(logits), want, rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: objectives.entropy(x).sum())(logits)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: objectives.clipped_policy_loss(x, x, x, x, 1.2), r"policy clip=1\.2"),
        (lambda x: objectives.clip_fraction(x, x, x, x, 0.0), r"policy clip=0\.0"),
        (lambda x: objectives.clipped_value_loss(x, x, x, x, 0.0), r"value clip=0\.0"),
        (lambda x: objectives.kl_divergence(x, x, x, "k4"), r"'k4'; expected one of \('k1'"),
        (lambda x: objectives.truncated_importance_weights(x, x, x, -1.0), r"cap=-1\.0"),
        (lambda x: objectives.masked_importance_weights(x, x, x, 2.0, 1.0), r"\[2\.0, 1\.0\]"),
    ],
)
def test_a_number_that_means_nothing_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.zeros((1, 2), np.float32))


# ---- mismatch ------------------------------------------------------------------------------------


def test_mismatch_of_the_recipes_example():
    sampler = jnp.asarray([[-1.0, -2.0, -3.0, -4.0]])
    train = jnp.asarray([[-1.0, -1.9, -3.1, jnp.nan]])
    got = mismatch.metrics(train, sampler, jnp.asarray([[1, 1, 1, 0]]))
    want = {"train_rollout_logprob_abs_diff": 0.0667, "k3": 0.00334, "max": 0.1,
            "token_mult_prob_error": 1.0701, "ppl_ratio": 1.0}  # fmt: skip
    assert {k: round(float(got[k]), 5 if k == "k3" else 4) for k in want} == want


def test_mismatch_equals_plain_float64_whatever_stands_off_the_mask():
    for seed in range(3):
        mask, _, clean = ragged.batch(seed)
        b = dirty(clean, mask)
        got = jax.jit(mismatch.metrics)(b["new"], b["old"], mask)
        want = plain.mismatch(clean["new"], clean["old"], mask)
        assert set(got) == set(want)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=2e-5, err_msg=name)


def test_equal_logprobs_and_no_tokens_are_a_perfect_match():
    perfect = {"train_rollout_logprob_abs_diff": 0, "k3": 0, "ppl_ratio": 1, "max": 0,
               "token_mult_prob_error": 1, "ESS": 1}  # fmt: skip
    same = np.array([[-0.5, -3.0, 0.0]])
    assert jax.tree.map(float, mismatch.metrics(same, same, np.ones((1, 3)))) == perfect
    nan = np.full((1, 3), np.nan)
    assert jax.tree.map(float, mismatch.metrics(nan, nan, np.zeros((1, 3)))) == perfect


def test_replaced_rows_compare_sets_per_layer():
    used = np.array([[[[0, 1], [2, 3], [4, 5]]], [[[0, 1], [2, 3], [4, 5]]]], np.uint8)
    live = np.array([[[[1, 0], [2, 4], [6, 7]]], [[[0, 1], [3, 2], [6, 7]]]], np.uint8)
    replaced, counted = mismatch.replaced_rows(used, live, np.array([[1, 1, 0]]))
    np.testing.assert_array_equal(replaced, [1, 0])
    np.testing.assert_array_equal(counted, [2, 2])


def test_expert_load_counts_real_tokens_and_its_imbalance():
    used = np.array([[[[0, 1], [0, 3], [2, 3]]]], np.uint8)
    load = mismatch.expert_load(used, np.array([[1, 1, 0]]), 4)
    np.testing.assert_array_equal(load, [[2, 1, 0, 1]])
    np.testing.assert_allclose(mismatch.load_imbalance(load), [2.0])

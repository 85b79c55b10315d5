"""Estimates against independent computations: enumeration, closed forms, scipy."""

import itertools

import numpy as np
import pytest
from scipy import stats

from t1jax.errors import UserError
from t1jax.evaluation.statistics import (
    Estimate,
    bootstrap,
    by_group,
    compare,
    mcnemar,
    mean,
    pass_at_k,
)


def scores_of(rows):
    return {f"t{number}": row for number, row in enumerate(rows)}


def test_pass_at_1_weighs_tasks_alike_however_often_they_were_attempted():
    scores = {"a": [1, 1, 1, 1, 0, 0, 0, 0], "b": [1], "c": [0, 0]}
    assert mean(scores).value == pytest.approx((0.5 + 1 + 0) / 3)
    assert mean(scores).tasks == 3


def test_resamples_have_the_distribution_of_all_resamples():
    """4 tasks: all 4^4 resamples can be enumerated."""
    values = np.array([0.0, 0.25, 0.5, 1.0])
    every = np.array([np.mean(drawn) for drawn in itertools.product(values, repeat=4)])
    drawn = bootstrap(values, seed=0, draws=200_000)
    for point in (0.0, 0.25, 0.4375, 0.5, 0.75):
        assert np.mean(drawn <= point) == pytest.approx(np.mean(every <= point), abs=0.005)


def test_an_interval_is_the_bootstrap_of_whole_tasks():
    """Attempts go with their task: many attempts at few tasks do not narrow the interval."""
    random = np.random.default_rng(0)
    chance = random.beta(1, 1, 40)
    once = scores_of([[float(random.random() < p)] * 50 for p in chance])
    few = scores_of([row[:1] for row in once.values()])
    assert mean(once) == mean(few)
    values = [row[0] for row in once.values()]
    reference = stats.bootstrap((values,), np.mean, method="percentile", random_state=1)
    got = mean(once)
    assert got.low == pytest.approx(reference.confidence_interval.low, abs=0.02)
    assert got.high == pytest.approx(reference.confidence_interval.high, abs=0.02)


def test_intervals_cover_what_they_promise():
    """300 evaluations of 60 tasks x 3 attempts, whose true pass@1 is known."""
    random = np.random.default_rng(1)
    covered = 0
    for number in range(300):
        chance = random.beta(2, 2, 60)
        rows = (random.random((60, 3)) < chance[:, None]).astype(float)
        got = mean(scores_of(rows.tolist()), seed=number)
        covered += got.low <= 0.5 <= got.high
    assert 0.90 <= covered / 300 <= 0.985


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts(k):
    rows = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0]]
    shares = [
        np.mean([any(chosen) for chosen in itertools.combinations(row, k)])
        for row in rows
        if len(row) >= k
    ]
    got = pass_at_k(scores_of(rows), k)
    assert got.value == pytest.approx(np.mean(shares))
    assert got.tasks == len(shares)


def test_pass_at_k_without_enough_attempts_says_nothing():
    assert pass_at_k({"a": [1, 0]}, 3) == Estimate(value=None, low=None, high=None, tasks=0)
    with pytest.raises(UserError, match=r"pass@0: expected at least 1"):
        pass_at_k({"a": [1]}, 0)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (0, 1), (3, 3), (2, 9), (15, 4), (0, 40)])
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b):
    n = only_a + only_b
    expected = stats.binomtest(only_a, n, 0.5).pvalue if n else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(expected)


def test_a_comparison_pairs_tasks():
    """Equal gains on every task are certain, however much the tasks differ."""
    a = {"x": [0, 0, 0, 1], "y": [0, 1, 1, 1], "z": [0, 0, 1, 1], "only a": [1]}
    b = {"x": [0, 0, 1, 1], "y": [1, 1, 1, 1], "z": [0, 1, 1, 1], "only b": [0]}
    got = compare(a, b)
    assert got.difference.value == pytest.approx(0.25)
    assert (got.difference.tasks, got.unpaired) == (3, 2)
    # Most attempts: x never, y in both, z only in b.
    assert (got.only_a, got.only_b, got.p_value) == (0, 1, 1.0)
    turned = compare(b, a)
    assert turned.difference.value == pytest.approx(-0.25)
    assert (turned.only_a, turned.only_b) == (1, 0)


def test_a_paired_interval_is_narrower_than_an_unpaired_one():
    random = np.random.default_rng(2)
    base = random.random(80)
    a = scores_of([[x] for x in base * 0.8])
    b = scores_of([[x] for x in base * 0.8 + 0.1])
    b["t0"] = [a["t0"][0]]
    got = compare(a, b).difference
    differences = np.array([b[t][0] - a[t][0] for t in a])
    reference = stats.bootstrap((differences,), np.mean, method="percentile", random_state=1)
    assert got.low == pytest.approx(reference.confidence_interval.low, abs=1e-3)
    assert got.high - got.low < 0.2 * (mean(a).high - mean(a).low)


@pytest.mark.parametrize("solved", [0, 1])
def test_tasks_that_are_all_alike_still_have_an_interval(solved):
    """Where resamples say nothing, the exact binomial interval does."""
    got = mean(scores_of([[solved]] * 30))
    exact = stats.binomtest(30 * solved, 30).proportion_ci(0.95, "exact")
    assert (got.low, got.high) == pytest.approx((exact.low, exact.high))


def test_degenerate_inputs():
    assert mean({}) == Estimate(value=None, low=None, high=None, tasks=0)
    assert mean({"a": [1, 0]}) == Estimate(value=0.5, low=None, high=None, tasks=1)
    assert mean({"a": [1, 0]}).to_json() == {"value": 0.5, "ci95": None, "tasks": 1}
    assert compare({"a": [1]}, {"b": [1]}).difference.tasks == 0
    with pytest.raises(UserError, match="task a has no graded attempt"):
        mean({"a": []})
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(UserError, match="expected numbers from 0 to 1"):
            mean({"a": [wrong]})


def test_the_same_seed_gives_the_same_interval():
    scores = scores_of(np.random.default_rng(3).random((50, 2)).tolist())
    assert mean(scores, seed=5) == mean(scores, seed=5) != mean(scores, seed=6)


def test_groups_are_estimated_apart():
    scores = {"edit/1": [1], "edit/2": [0], "count/1": [1, 1]}
    got = by_group(scores, lambda task: task.split("/")[0])
    assert {name: (e.value, e.tasks) for name, e in got.items()} == {
        "count": (1.0, 1), "edit": (0.5, 2)
    }  # fmt: skip
    assert list(got) == ["count", "edit"]

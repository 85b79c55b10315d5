"""Estimates over tasks, each with an interval: pass@1, pass@k, fractions, paired differences.

The unit is the task: attempts at one task are not independent, so a resample takes a task with all
of its attempts. Scores are a mapping from a task to the scores of its graded attempts, each from 0
to 1. Knows nothing of trials or files.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from t1jax.errors import UserError

DRAWS = 10_000
LEVEL = 0.95
BLOCK = 2**22  # resampled indices held at once
Scores = Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks. None: too few tasks to say."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int

    def to_json(self) -> dict[str, object]:
        ci95 = None if self.low is None else [self.low, self.high]
        return {"value": self.value, "ci95": ci95, "tasks": self.tasks}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """B minus A on the tasks that both have."""

    difference: Estimate
    only_a: int  # tasks that A solves and B does not
    only_b: int
    p_value: float  # McNemar's exact test of the two counts
    unpaired: int  # tasks that only one of them has


def task_means(scores: Scores) -> np.ndarray:
    """One number a task: the mean of its attempts."""
    _check(scores)
    return np.array([np.mean(attempts) for attempts in scores.values()], np.float64)


def mean(scores: Scores, *, seed: int = 0) -> Estimate:
    """The mean over tasks of the mean over attempts; pass@1 for scores of 0 and 1."""
    return _estimate(task_means(scores), seed, bounds=(0.0, 1.0))


def pass_at_k(scores: Scores, k: int, *, seed: int = 0) -> Estimate:
    """The chance that one of k attempts solves a task, unbiased (Chen et al. 2021):

    1 - C(n - c, k) / C(n, k) for c solved of n attempts, averaged over tasks with n >= k.
    """
    if k < 1:
        raise UserError(f"pass@{k}: expected at least 1 attempt")
    _check(scores)
    chances = [
        1 - math.comb(len(attempts) - solved(attempts), k) / math.comb(len(attempts), k)
        for attempts in scores.values()
        if len(attempts) >= k
    ]
    return _estimate(np.array(chances, np.float64), seed, bounds=(0.0, 1.0))


def solved(attempts: Sequence[float]) -> int:
    """How many attempts got everything."""
    return sum(score == 1 for score in attempts)


def compare(a: Scores, b: Scores, *, seed: int = 0) -> Comparison:
    """B against A on the same tasks: the paired bootstrap of the difference, and McNemar's test.

    For the test a task counts as solved where more than half of its attempts are.
    """
    both = [task for task in a if task in b]
    means_a = task_means({task: a[task] for task in both})
    means_b = task_means({task: b[task] for task in both})
    most_a, most_b = (
        np.array([2 * solved(scores[task]) > len(scores[task]) for task in both], bool)
        for scores in (a, b)
    )
    only_a, only_b = int((most_a & ~most_b).sum()), int((most_b & ~most_a).sum())
    return Comparison(
        difference=_estimate(means_b - means_a, seed, bounds=(-1.0, 1.0)),
        only_a=only_a,
        only_b=only_b,
        p_value=mcnemar(only_a, only_b),
        unpaired=len(set(a) ^ set(b)),
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """The two-sided exact p-value: each task that tells them apart is a toss of a fair coin."""
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def by_group(
    scores: Scores, group_of: Callable[[str], str], *, seed: int = 0
) -> dict[str, Estimate]:
    """The mean of each group of tasks, groups in order."""
    groups: dict[str, dict[str, Sequence[float]]] = {}
    for task, attempts in scores.items():
        groups.setdefault(group_of(task), {})[task] = attempts
    return {name: mean(groups[name], seed=seed) for name in sorted(groups)}


def bootstrap(values: np.ndarray, *, seed: int, draws: int = DRAWS) -> np.ndarray:
    """Means of resamples with replacement, [draws]."""
    n, random = len(values), np.random.default_rng(seed)
    step = max(BLOCK // n, 1)
    parts = [
        values[random.integers(0, n, (min(step, draws - begin), n))].mean(axis=1)
        for begin in range(0, draws, step)
    ]
    return np.concatenate(parts)


def _estimate(values: np.ndarray, seed: int, bounds: tuple[float, float]) -> Estimate:
    """The mean and its percentile interval; where all values are equal, an exact one-sided bound.

    Resamples of equal values say nothing about what was not seen. That the tasks of another draw
    differ is possible all the same: with n tasks alike, by Clopper and Pearson, a share of up to
    1 - (alpha / 2)^(1 / n) of all tasks may, and each moves the mean to the end of its range.
    """
    n = len(values)
    if n == 0:
        return Estimate(value=None, low=None, high=None, tasks=0)
    value = float(values.mean())
    if n == 1:
        return Estimate(value=value, low=None, high=None, tasks=1)
    if np.ptp(values) == 0:
        share = 1 - ((1 - LEVEL) / 2) ** (1 / n)
        low, high = (value + share * (bound - value) for bound in bounds)
    else:
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        low, high = map(float, np.quantile(bootstrap(values, seed=seed), tails))
    return Estimate(value=value, low=low, high=high, tasks=n)


def _check(scores: Scores) -> None:
    for task, attempts in scores.items():
        if len(attempts) == 0:
            raise UserError(f"task {task} has no graded attempt; leave it out, and say so")
        if not all(0 <= score <= 1 for score in attempts):
            raise UserError(
                f"task {task} has scores {list(attempts)}; expected numbers from 0 to 1"
            )

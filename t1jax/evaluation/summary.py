"""The numbers of one evaluation from its lines of results, and the table that shows them.

A trial that infrastructure broke is left out of every estimate and shown; with too many of them,
or a task without any graded attempt, there is no headline: what is left may be the easy part.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from t1jax.evaluation import statistics
from t1jax.evaluation.statistics import Estimate, Scores
from t1jax.pipeline.trials import Played

MOST_BROKEN = 0.1  # of the trials, before a headline is refused
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """Pass@1, or why it is refused."""

    estimate: Estimate
    refused: str


def summarize(results: Sequence[Played], *, attempts: int, seed: int) -> Json:
    """Everything that can be said of these trials.

    Args:
      results: every trial's, graded or not: `attempts` of each task.
      attempts: of each task, as asked for.
      seed: of the bootstrap.
    """
    headline = headline_of(results, seed=seed)
    solved, fractions = scores_of(results, "solved"), scores_of(results, "fraction")
    first = {played.task: played for played in results}
    refused = bool(headline.refused)
    shown = headline.estimate.to_json()
    return {
        "pass_at_1": None if refused else shown["value"],
        "ci95": None if refused else shown["ci95"],
        "refused": headline.refused,
        "tasks": len(first),
        "attempts": attempts,
        "trials": len(results),
        "graded": sum(played.graded for played in results),
        "infra_failures": sum(not played.graded for played in results),
        "tasks_missing": sorted(set(first) - set(solved)),
        "observed": {
            "pass_at_1": shown,
            "pass_at_k": {
                str(k): statistics.pass_at_k(solved, k, seed=seed).to_json()
                for k in range(1, attempts + 1)
            },
            "by_category": _groups(solved, lambda task: first[task].category, seed),
            "by_difficulty": _groups(solved, lambda task: first[task].difficulty, seed),
        },
        "mean_fraction": statistics.mean(fractions, seed=seed).to_json(),
        "outcomes": dict(sorted(Counter(played.outcome for played in results).items())),
        "errors": Counter(p.error for p in results if not p.graded).most_common(10),
        **_usage([played for played in results if played.graded]),
    }


def headline_of(results: Sequence[Played], *, seed: int) -> Headline:
    """Pass@1 of what was graded, and why it may not be called that."""
    solved = scores_of(results, "solved")
    missing = sorted({played.task for played in results} - set(solved))
    broken = sum(not played.graded for played in results)
    reasons = []
    if broken > MOST_BROKEN * len(results):
        reasons.append(
            f"{broken} of {len(results)} trials are infrastructure failures, more than "
            f"{MOST_BROKEN:.0%}"
        )
    if missing:
        reasons.append(f"{len(missing)} tasks have no graded attempt, such as {missing[0]}")
    estimate = statistics.mean(solved, seed=seed)
    return Headline(estimate=estimate, refused="; ".join(reasons))


def scores_of(results: Sequence[Played], field: str) -> dict[str, list[float]]:
    """A number of each graded attempt, by task: `solved`, `fraction` or `gained`."""
    scores: dict[str, list[float]] = {}
    for played in results:
        value = getattr(played, field)
        if played.graded and value is not None:
            scores.setdefault(played.task, []).append(float(value))
    return scores


def _groups(scores: Scores, group_of: Callable[[str], str], seed: int) -> Json:
    groups = statistics.by_group(scores, lambda task: group_of(task) or "none", seed=seed)
    return {name: estimate.to_json() for name, estimate in groups.items()}


def _usage(graded: Sequence[Played]) -> Json:
    """Turns, tokens and seconds of a graded trial."""
    columns: dict[str, list[float]] = {
        "turns": [played.usage.turns for played in graded],
        "tokens": [played.usage.tokens for played in graded],
        "sampled_tokens": [played.usage.sampled_tokens for played in graded],
        "commands": [played.commands for played in graded],
        "seconds": [sum(played.seconds.values()) for played in graded],
    }
    return {name: _spread(values) for name, values in columns.items()}


def _spread(values: Sequence[float]) -> Json:
    if not values:
        return {"mean": None, "median": None, "p90": None, "total": 0}
    return {
        "mean": round(float(np.mean(values)), 3),
        "median": round(float(np.median(values)), 3),
        "p90": round(float(np.quantile(values, 0.9)), 3),
        "total": round(float(np.sum(values)), 3),
    }


# ---- for people ----------------------------------------------------------------------------------


def table(name: str, summary: Mapping[str, Any]) -> Table:
    """An evaluation at a glance: the headline, then groups, then what became of the trials."""
    title = f"{name}: {summary['tasks']} tasks × {summary['attempts']} attempts"
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    shown.add_column("tasks", justify="right")
    shown.add_column("pass@1", justify="right")
    shown.add_column("95% interval", justify="right")
    observed = summary["observed"]
    whole = observed["pass_at_1"]
    shown.add_row(*_row("no headline" if summary["refused"] else "all", whole), end_section=True)
    for group in ("by_category", "by_difficulty"):
        rows = list(observed[group].items())
        for number, (value, estimate) in enumerate(rows, 1):
            label = f"{group.removeprefix('by_')} {value}"
            shown.add_row(*_row(label, estimate), end_section=number == len(rows))
    for k, estimate in observed["pass_at_k"].items():
        if k != "1":
            shown.add_row(*_row(f"pass@{k}", estimate))
    shown.add_row(*_row("mean fraction", summary["mean_fraction"]))
    return shown


def _row(label: str, estimate: Mapping[str, Any]) -> tuple[str, str, str, str]:
    value, ci95 = estimate["value"], estimate["ci95"]
    return (
        label,
        str(estimate["tasks"]),
        "-" if value is None else f"{value:.1%}",
        "-" if ci95 is None else f"{ci95[0]:.1%} – {ci95[1]:.1%}",
    )


def lines(summary: Mapping[str, Any]) -> list[str]:
    """What the table has no room for."""
    outcomes = ", ".join(f"{number} {name}" for name, number in summary["outcomes"].items())
    per_trial = ", ".join(
        f"{summary[name]['mean']:.4g} {name.replace('_', ' ')}"
        for name in ("turns", "tokens", "commands", "seconds")
        if summary[name]["mean"] is not None
    )
    return [
        f"outcomes of {summary['trials']} trials: {outcomes}",
        f"infrastructure failures, left out: {summary['infra_failures']}",
        *([f"a graded trial on average: {per_trial}"] if per_trial else []),
    ]

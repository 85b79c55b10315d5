"""Ablations as a table: reward, solved tasks, log-prob gap, each with an interval over seeds.

An interval is Student's over the seeds' numbers: with the three or five that one can afford, a
bootstrap of so few values would be too narrow. Differences to `full` are of the same seeds.
Knows nothing of how runs are made.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t1jax.errors import UserError
from t1jax.evaluation.run_folder import RunFolder

# 97.5% quantiles of Student's t with 1, 2, … degrees of freedom; beyond the last its own is taken,
# which is a little too wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
QUARTER = 0.25  # of the steps: what is averaged at the end, and at the beginning
METRICS = ("reward", "success", "gap", "explained_variance", "explained_variance_first")
Numbers = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """One variant under every seed."""

    name: str
    changes: Mapping[str, Sequence[Any]]
    by_seed: Mapping[int, Numbers]

    def values(self, metric: str) -> dict[int, float]:
        """The seeds that have this number."""
        found = {seed: numbers[metric] for seed, numbers in self.by_seed.items()}
        return {seed: value for seed, value in found.items() if value is not None}


def numbers_of(run: RunFolder, evaluation: str) -> Numbers:
    """What one run came to. None: it has no such number.

    reward: mean of the trained episodes over the last quarter of PPO's steps; success: pass@1 of
    the evaluation; gap: mean |log-prob of trainer - of sampler| over all steps; explained_variance:
    of the critic over the last quarter; explained_variance_first: over the first.
    """
    return {
        "reward": _last(run, "reward/mean"),
        "success": run.evaluations[evaluation].summary["pass_at_1"],
        "gap": _mean(run.series("ppo", "mismatch/train_rollout_logprob_abs_diff")[1]),
        "explained_variance": _last(run, "explained_variance"),
        "explained_variance_first": _first(run, "explained_variance"),
    }


def _last(run: RunFolder, metric: str) -> float | None:
    _, values = run.series("ppo", metric)
    return _mean(values[-max(_quarter(values), 1) :])


def _first(run: RunFolder, metric: str) -> float | None:
    _, values = run.series("ppo", metric)
    return _mean(values[: _quarter(values)])


def _quarter(values: Sequence[float]) -> int:
    return math.ceil(QUARTER * len(values))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95% interval over seeds; none of fewer than two."""
    if not values:
        return {"mean": None, "ci95": None, "seeds": 0}
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "ci95": None, "seeds": 1}
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "ci95": [mean - half, mean + half], "seeds": len(values)}


def compared(full: Trained, other: Trained, metric: str) -> dict[str, Any]:
    """The other less `full`, by seed; of seeds that both have."""
    before, after = full.values(metric), other.values(metric)
    return interval([after[seed] - before[seed] for seed in after if seed in before])


def tabulate(folder: Path, trained: Sequence[Trained]) -> Path:
    """Writes ablations.json and ablations.md, prints the table; where it is."""
    full = trained[0]
    if not full.by_seed:
        raise UserError(f"{folder}: no seed was trained")
    rows = [_row(full, each) for each in trained]
    text = markdown(rows)
    _write(folder / "ablations.json", json.dumps({"variants": rows}, indent=1, allow_nan=False))
    _write(folder / "ablations.md", text)
    print(text)
    print(f"wrote {folder / 'ablations.md'} and ablations.json beside it")
    return folder / "ablations.md"


def _row(full: Trained, each: Trained) -> dict[str, Any]:
    return {
        "name": each.name,
        "changes": dict(each.changes),
        **{metric: interval(list(each.values(metric).values())) for metric in METRICS},
        "less_full": {} if each is full else {
            metric: compared(full, each, metric) for metric in METRICS
        },
        "by_seed": {str(seed): dict(numbers) for seed, numbers in each.by_seed.items()},
    }  # fmt: skip


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for people."""
    seeds = max(len(row["by_seed"]) for row in rows)
    head = ("", "changed", "reward", "solved", "solved, less full", "log-prob gap",
            "expl. var. at first", "at last")
    lines = [
        f"# Ablations of PPO, {seeds} seed{'s' * (seeds != 1)} each",
        "",
        "Means and 95% intervals (Student's) over seeds; differences are of the same seeds. "
        "Reward: last quarter of the steps; solved: validation split, last weights; gap: mean "
        "|Δ log-prob| of trainer and sampler; explained variance of the critic: first and last "
        "quarter.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in rows:
        less = row["less_full"].get("success")
        changed = ", ".join(f"{k}: {_told(v[1])}" for k, v in row["changes"].items()) or "nothing"
        cells = (
            row["name"], changed, _cell(row["reward"], "{:.3f}", seeds),
            _cell(row["success"], "{:.1%}", seeds),
            "" if less is None else _cell(less, "{:+.1%}", seeds),
            _cell(row["gap"], "{:.2g}", seeds),
            _cell(row["explained_variance_first"], "{:.2f}", seeds),
            _cell(row["explained_variance"], "{:.2f}", seeds),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _told(value: Any) -> str:
    return "none" if value is None else str(value)


def _cell(told: Mapping[str, Any], form: str, seeds: int) -> str:
    """A mean, its interval, and of how many seeds it is where some lack the number."""
    if told["mean"] is None:
        return "-"
    mean, ci95 = form.format(told["mean"]), told["ci95"]
    text = mean if ci95 is None else f"{mean} ({' to '.join(map(form.format, ci95))})"
    return text if told["seeds"] == seeds else f"{text}, {told['seeds']} of {seeds} seeds"


def _write(file: Path, text: str) -> None:
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    aside.replace(file)

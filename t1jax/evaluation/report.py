"""`t1jax report RUN`: one page that says how a run went, its figures, and the numbers as JSON.

    RUN/report/index.html     everything, with nothing from elsewhere
    RUN/report/NAME.png       each figure
    RUN/report/summary.json   the numbers of the headline, for programs

Parts that a run has not come to are said in the page and null in the summary.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from t1jax.evaluation.drawing import Drawn
from t1jax.evaluation.excerpts import LEVEL_NAMES, excerpts, plain
from t1jax.evaluation.figures import experts, learning, mismatch, results, time
from t1jax.evaluation.figures.shared import Absent, label
from t1jax.evaluation.pages import render, write_folder
from t1jax.evaluation.routes import expert_load
from t1jax.evaluation.run_folder import (
    CELLS,
    EVALUATED,
    Evaluation,
    Json,
    RunFolder,
    read_run,
)
from t1jax.evaluation.statistics import Comparison, compare
from t1jax.evaluation.summary import scores_of

Draw = Callable[[RunFolder], Drawn]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Figures that answer one question, and why others are not there."""

    name: str
    title: str
    figures: Sequence[Drawn]
    absent: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Tasks of a kind: each evaluation's estimate, None where it had none of them."""

    name: str
    tasks: int
    cells: Sequence[Json | None]


def report(run: str | Path) -> Path:
    """Writes RUN/report.

    Returns: the page.

    Raises:
      UserError: it is no run's folder, or a file in it cannot be read.
    """
    found = read_run(run)
    paired = improvement(found)
    sections = drawn_sections(found)
    numbers = summary(found, paired)
    page = render(
        "report.html.j2",
        run=found,
        numbers=numbers,
        paired=paired,
        shown=[found.evaluations[name] for name in EVALUATED if name in found.evaluations],
        lacking=[name for name in EVALUATED if name not in found.evaluations],
        sections=sections,
        splits=splits(found),
        reads=reads(found),
        facts=facts(found),
        groups=groups(found),
        levels=LEVEL_NAMES,
        excerpts=excerpts(found),
        config=_config_text(found),
    )
    drawings = [figure for section in sections for figure in section.figures]
    files = {"summary.json": json.dumps(numbers, indent=1) + "\n"}
    written = write_folder(found.path / "report", page, drawings, files)
    print(f"wrote {written} with {len(drawings)} figures, and summary.json beside it")
    return written


def drawn_sections(run: RunFolder) -> list[Section]:
    """All figures, in the order of the page."""

    def loads(found: RunFolder) -> Drawn:
        return experts.expert_load(found, expert_load(found))

    told: list[tuple[str, str, Sequence[Draw]]] = [
        ("result", "Result", (results.pass_at_1, results.composition)),
        ("learning", "Learning", (learning.reward, learning.outcomes, learning.critic,
                                  learning.sft_loss)),
        ("mismatch", "Trainer against sampler", (mismatch.gap, mismatch.ablation)),
        ("experts", "Experts", (experts.replay_rate, loads)),
        ("time", "Time", (time.stage_seconds, time.step_seconds)),
    ]  # fmt: skip
    return [_section(run, *each) for each in told]


def _section(run: RunFolder, name: str, title: str, draw: Sequence[Draw]) -> Section:
    made, absent = [], []
    for each in draw:
        try:
            made.append(each(run))
        except Absent as reason:
            absent.append(str(reason))
    return Section(name=name, title=title, figures=made, absent=absent)


# ---- numbers -------------------------------------------------------------------------------------


def improvement(run: RunFolder) -> Comparison | None:
    """PPO against SFT on the same tasks; None where either has no headline or the tasks differ."""
    pair = [run.evaluations.get(name) for name in ("sft", "ppo")]
    before, after = pair
    if before is None or after is None or before.refused or after.refused:
        return None
    comparison = compare(*(scores_of(e.results, "solved") for e in (before, after)))
    return None if comparison.unpaired else comparison


def summary(run: RunFolder, paired: Comparison | None) -> Json:
    """The headline's numbers. null: there is none."""
    return {
        "stages": {name: _stage(run.evaluations.get(name)) for name in EVALUATED},
        "paired": {"ppo_minus_sft": None if paired is None else _difference(paired)},
        "mismatch": {name: _cell(run, name) for name in CELLS},
        "critic": {"explained_variance": last_explained_variance(run)},
        "seconds": dict(run.seconds),
    }


def _stage(evaluation: Evaluation | None) -> Json | None:
    if evaluation is None:
        return None
    told = evaluation.summary
    return {
        "pass_at_1": told["pass_at_1"],
        "ci95": told["ci95"],
        "mean_fraction": told["mean_fraction"]["value"],
        "tasks": told["tasks"],
        "attempts": told["attempts"],
        "infra_failures": told["infra_failures"],
    }


def _difference(paired: Comparison) -> Json:
    told = paired.difference.to_json()
    return {"difference": told["value"], "ci95": told["ci95"]}


def _cell(run: RunFolder, name: str) -> Json | None:
    if name not in run.mismatch:
        return None
    cell = run.mismatch[name]
    return {"abs_diff": cell.abs_diff, "ci95": list(cell.ci95)}


def last_explained_variance(run: RunFolder) -> float | None:
    """Of the last update of PPO's critic, else of its warm-up, that has one."""
    for stage in ("ppo", "critic"):
        _, values = run.series(stage, "explained_variance")
        if values:
            return values[-1]
    return None


SHOWN = (  # of the config, in the head of the page
    "seed", "model.dtype", "ppo.steps", "ppo.batch_trajectories", "ppo.staleness", "ppo.replay",
    "ppo.tokens", "ppo.reward", "ppo.baseline",
)  # fmt: skip


def facts(run: RunFolder) -> dict[str, str]:
    """What tells this run from another, where its config says it."""
    found = {}
    for key in SHOWN:
        value: Any = run.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[key] = str(value)
    return found


def splits(run: RunFolder) -> str:
    """Of which split the usual evaluations are; each on its own where they differ."""
    shown = {name: run.evaluations[name].split for name in EVALUATED if name in run.evaluations}
    if len(set(shown.values())) == 1:
        return f"{next(iter(shown.values()))} split"
    return ", ".join(f"{split} split ({label(name)})" for name, split in shown.items())


def reads(run: RunFolder) -> list[str]:
    """How often each split was read: a choice that is made on the test split is no result.

    Weights are told apart by their manifest; the same ones evaluated twice are two reads.
    """
    by_split: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations.values():
        by_split.setdefault(evaluation.split, []).append(evaluation)
    told = []
    for split, found in sorted(by_split.items()):
        names = ", ".join(label(plain(e.name)) for e in found)
        weights = {_weights(e) for e in found}
        told.append(
            f"The {split} split was read by {len(found)} evaluation{'s' * (len(found) > 1)} of "
            f"this run ({names}), of {len(weights)} weights"
            + (": once each." if len(weights) == len(found) else ": some more than once.")
        )
    return told


def _weights(evaluation: Evaluation) -> str:
    """What tells the evaluated weights from others."""
    told = evaluation.summary
    return str(
        told.get("manifest_sha256") or told.get("checkpoint") or told.get("endpoint_model", "")
    )


def groups(run: RunFolder) -> list[Group]:
    """Rows of the table by category and difficulty, over the usual evaluations."""
    shown = [run.evaluations[name] for name in EVALUATED if name in run.evaluations]
    found = []
    for field in ("category", "difficulty"):
        by_name = [e.summary["observed"][f"by_{field}"] for e in shown]
        for name in sorted({name for each in by_name for name in each}):
            cells = [each.get(name) for each in by_name]
            tasks = max(cell["tasks"] for cell in cells if cell is not None)
            found.append(Group(name=f"{field} {plain(name)}", tasks=tasks, cells=cells))
    return found


def _config_text(run: RunFolder) -> str:
    """The resolved config as it was written; empty where there is none yet."""
    file = run.path / "config.yaml"
    return file.read_text(encoding="utf-8") if file.is_file() else ""

"""`t1jax compare RUN_A RUN_B`: what differs in the config, curves over each other, paired tests.

Two evaluations are tested against each other only where they are of the same tasks, which names,
descriptions and, where trajectories are kept, prompts have to agree on. Differences are B less A.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from t1jax.errors import UserError
from t1jax.evaluation.excerpts import TRAJECTORY, open_chat, plain
from t1jax.evaluation.figures.overlays import CURVES, overlay
from t1jax.evaluation.figures.shared import Absent, label, percent
from t1jax.evaluation.pages import render, write_folder
from t1jax.evaluation.run_folder import Evaluation, RunFolder, read_run
from t1jax.evaluation.statistics import Comparison
from t1jax.evaluation.statistics import compare as paired
from t1jax.evaluation.summary import scores_of
from t1jax.trajectory.io import load_trajectory

NONE = "not set"
OWN = ("run",)  # keys of the config that every run has for itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Test:
    """An evaluation that both runs have."""

    name: str
    a: Evaluation
    b: Evaluation
    result: Comparison
    settings: list[tuple[str, str, str]]  # in which the two were evaluated differently

    @property
    def refused(self) -> str:
        """Why one of them has no headline."""
        return "; ".join(
            f"{n}: {e.refused}" for n, e in (("A", self.a), ("B", self.b)) if e.refused
        )


def compare(run_a: str | Path, run_b: str | Path, out: str = "") -> Path:
    """Writes OUT (RUN_B/compare/NAME_OF_A if empty) and prints tables.

    Returns: the page.

    Raises:
      UserError: one is no run's folder, or an evaluation of both is not of the same tasks.
    """
    a, b = read_run(run_a), read_run(run_b)
    tests = [
        _test(name, a, b) for name, evaluation in a.evaluations.items() if name in b.evaluations
    ]
    changes = difference(a.config, b.config)
    drawings, absent = [], []
    for curve in CURVES:
        try:
            drawings.append(overlay(a, b, curve))
        except Absent as reason:
            absent.append(str(reason))
    page = render(
        "compare.html.j2", a=a, b=b, tests=tests, changes=changes, figures=drawings, absent=absent
    )
    written = write_folder(Path(out) if out else b.path / "compare" / a.name, page, drawings)
    _print(a, b, tests, changes)
    print(f"wrote {written}")
    return written


# ---- what differs --------------------------------------------------------------------------------


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose values are not the same, with both as text."""
    before, after = leaves(a), leaves(b)
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, _told(before, key), _told(after, key))
        for key in keys
        if key not in OWN and (key in before, before.get(key)) != (key in after, after.get(key))
    ]


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by the whole path of their keys."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{above}.{name}" if above else str(name)
        found |= leaves(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def _told(values: Mapping[str, Any], key: str) -> str:
    return plain(repr(values[key])) if key in values else NONE


# ---- paired tests --------------------------------------------------------------------------------

SETTINGS = ("split", "attempts", "seed", "sampling", "limit")


def _test(name: str, a: RunFolder, b: RunFolder) -> Test:
    of_a, of_b = a.evaluations[name], b.evaluations[name]
    _check_same_tasks(of_a, of_b)
    _check_same_prompts(a, b, name)
    settings = [{key: e.summary[key] for key in SETTINGS if key in e.summary} for e in (of_a, of_b)]
    solved = (scores_of(e.results, "solved") for e in (of_a, of_b))
    return Test(name=name, a=of_a, b=of_b, result=paired(*solved), settings=difference(*settings))


def _check_same_tasks(a: Evaluation, b: Evaluation) -> None:
    """Names, and what the results say of each task."""
    of_a, of_b = _described(a), _described(b)
    only_a, only_b = sorted(set(of_a) - set(of_b)), sorted(set(of_b) - set(of_a))
    if only_a or only_b:
        raise UserError(
            f"{a.folder} has {len(of_a)} tasks and {b.folder} {len(of_b)}; {len(only_a)} are only "
            f"in the first, {len(only_b)} only in the second, such as {(only_a + only_b)[0]}. A "
            "paired test needs the same tasks: evaluate one of them again on the other's"
        )
    for task in sorted(of_a):
        for name in of_a[task]:
            told = of_a[task][name], of_b[task][name]
            if None not in told and told[0] != told[1]:
                raise UserError(
                    f"task {task} has {name} {told[0]} in {a.folder} and {told[1]} in {b.folder}: "
                    "the same name, another task. Were both made by the same seed and version?"
                )


def _described(evaluation: Evaluation) -> dict[str, dict[str, str | int | None]]:
    """What can be known of each task; None: no attempt was graded."""
    found: dict[str, dict[str, str | int | None]] = {}
    for played in sorted(evaluation.results, key=lambda played: played.graded):
        labels = {"category": played.category, "difficulty": played.difficulty}
        found[played.task] = {**labels, "assertions": played.total}
    return found


def _check_same_prompts(a: RunFolder, b: RunFolder, name: str) -> None:
    """Openings, where both runs kept trajectories and presented tasks alike."""
    if a.config.get("agent") != b.config.get("agent"):
        return
    of_a, of_b = _openings(a, name), _openings(b, name)
    for task in sorted(set(of_a) & set(of_b)):
        if of_a[task] != of_b[task]:
            raise UserError(
                f"task {task} reads otherwise in {a.evaluations[name].folder} than in "
                f"{b.evaluations[name].folder}: the same name, another task. Were both made by the "
                "same seed and version?"
            )


def _openings(run: RunFolder, name: str) -> dict[str, str]:
    """What the policy was given first, by task; of tasks with a trajectory."""
    chat = open_chat(run)
    if chat is None:
        return {}
    found: dict[str, str] = {}
    for (task, _), folder in run.evaluations[name].trial_folders().items():
        if task not in found and (folder / TRAJECTORY).is_dir():
            chunk = load_trajectory(folder / TRAJECTORY).chunks[0]
            found[task] = chat.decode(chunk.ids[: chunk.turns[0].sampled])
    return found


# ---- for people ----------------------------------------------------------------------------------


PLAIN_WIDTH = 120  # where output is no terminal


def _print(
    a: RunFolder, b: RunFolder, tests: list[Test], changes: list[tuple[str, str, str]]
) -> None:
    stream = sys.stdout
    console = Console(width=None if stream.isatty() else PLAIN_WIDTH)
    print(f"A: {a.path}\nB: {b.path}")
    if changes:
        console.print(_changes_table(changes))
    else:
        print("config: no difference, or not written yet")
    if tests:
        console.print(_tests_table(tests))
    else:
        print("no evaluation of the same name is finished in both runs: nothing to test")
    for test in tests:
        for key, before, after in test.settings:
            print(f"{test.name}: evaluated with {key} {before} in A, {after} in B")
        if test.refused:
            print(f"{test.name}: no headline, {test.refused}")


def _changes_table(changes: list[tuple[str, str, str]]) -> Table:
    table = Table(title="config", title_justify="left")
    for name in ("key", "A", "B"):
        table.add_column(name, overflow="fold")
    for change in changes:
        table.add_row(*change)
    return table


def _tests_table(tests: list[Test]) -> Table:
    table = Table(title="paired tests, B less A", title_justify="left")
    for name in (
        "evaluation",
        "tasks",
        "A",
        "B",
        "points",
        "95% interval",
        "only A",
        "only B",
        "p",
    ):
        table.add_column(name, justify="left" if name == "evaluation" else "right")
    for test in tests:
        told = test.result.difference
        table.add_row(
            label(test.name), str(told.tasks), _headline(test.a), _headline(test.b),
            points(told.value), f"{points(told.low)} to {points(told.high)}",
            str(test.result.only_a), str(test.result.only_b), f"{test.result.p_value:.2g}",
        )  # fmt: skip
    return table


def _headline(evaluation: Evaluation) -> str:
    value = evaluation.summary["pass_at_1"]
    return "none" if value is None else percent(value)


def points(share: float | None) -> str:
    """A difference of shares for people."""
    return "-" if share is None else f"{100 * share:+.1f}"

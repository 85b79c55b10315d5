"""What a run's folder says, read once: the report and the comparison are made of this alone.

    RUN/config.yaml  metrics.jsonl  stages.jsonl  mismatch.json  evaluation/NAME/

Any of them may not be there yet; that is told, not filled in. One that is there and cannot be read
is an error. Knows nothing of figures or pages.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from t1jax.errors import UserError
from t1jax.evaluation.results import RESULTS, SUMMARY, read_results
from t1jax.pipeline import metrics
from t1jax.pipeline.trials import PLAYED, Played

T = TypeVar("T")
Json = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
EVALUATED = ("base", "sft", "ppo")  # the evaluations that a whole run makes
CELLS = ("tito_replay", "tito_live", "retokenised_replay", "retokenised_live")

PARTS = ("engine", "routing", "tokens", "movement")  # of the gap, and an update's for scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One finished `t1jax eval`."""

    name: str
    folder: Path
    summary: Json
    results: Sequence[Played]

    @property
    def split(self) -> str:
        return str(self.summary.get("split", "unknown"))

    @property
    def refused(self) -> str:
        """Why there is no headline; empty where there is one."""
        return str(self.summary["refused"])

    def trial_folders(self) -> dict[tuple[str, int], Path]:
        """The directory of each trial, by task and attempt."""
        found = {}
        for file in sorted(self.folder.glob(f"*/{PLAYED}")):
            fields = _read_json(file)
            found[fields["task"], fields["attempt"]] = file.parent
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A cell of the ablation or a part of the gap: mean |log-prob of trainer - of sampler|."""

    abs_diff: float
    ci95: tuple[float, float]
    facts: Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Everything there is."""

    path: Path
    config: Json  # as resolved; empty where no training stage has begun
    rows: Mapping[str, Rows]  # of metrics.jsonl, by stage
    evaluations: Mapping[str, Evaluation]
    mismatch: Mapping[str, Mismatch]  # the cells
    parts: Mapping[str, Mismatch]  # what the gap is made of, where it was told
    seconds: Mapping[str, float]  # of finished stages, from stages.jsonl

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def series(self, stage: str, metric: str) -> tuple[list[int], list[float]]:
        """Steps and numbers of a metric, where it was finite."""
        told = [
            (row["step"], row[metric]) for row in self.rows.get(stage, ()) if _known(row, metric)
        ]
        return [step for step, _ in told], [float(value) for _, value in told]


def _known(row: Mapping[str, Any], metric: str) -> bool:
    return row.get(metric) is not None


def read_run(run: str | Path) -> RunFolder:
    """Reads a run's folder.

    Raises:
      UserError: it is no run's folder, or a file in it cannot be read.
    """
    path = Path(run)
    cells = _mismatch(path / "mismatch.json")
    found = RunFolder(
        path=path,
        config=_config(path / "config.yaml"),
        rows=_rows(path),
        evaluations=_evaluations(path / "evaluation"),
        mismatch={name: cells[name] for name in CELLS if name in cells},
        parts={name: cells[name] for name in PARTS if name in cells},
        seconds=_seconds(path / "stages.jsonl"),
    )
    if not (found.config or found.rows or found.evaluations):
        raise UserError(
            f"{path} holds no config.yaml, {metrics.FILE} or finished evaluation; expected a run's "
            "folder, the `run:` of a config"
        )
    return found


def _config(file: Path) -> Json:
    if not file.is_file():
        return {}
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file} holds no mapping; expected a run's resolved config")
    return tree


def _rows(run: Path) -> dict[str, Rows]:
    if not (run / metrics.FILE).is_file():
        return {}
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for row in metrics.read_metrics(run):
        by_stage.setdefault(row["stage"], []).append(row)
    return dict(by_stage)


def _evaluations(folder: Path) -> dict[str, Evaluation]:
    """Those that ended, the usual ones first."""
    names = [file.parent.name for file in folder.glob(f"*/{SUMMARY}")]
    order = [*(name for name in EVALUATED if name in names), *sorted({*names} - {*EVALUATED})]
    return {name: _evaluation(folder / name) for name in order}


def _evaluation(folder: Path) -> Evaluation:
    summary = _read_json(folder / SUMMARY)
    lacking = [k for k in ("pass_at_1", "refused", "tasks", "attempts") if k not in summary]
    if lacking:
        raise UserError(f"{folder / SUMMARY} lacks {lacking[0]}; expected what `t1jax eval` writes "
                        f"beside {RESULTS}")  # fmt: skip
    return Evaluation(
        name=folder.name, folder=folder, summary=summary, results=read_results(folder)
    )


def _mismatch(file: Path) -> dict[str, Mismatch]:
    """Cells, parts and the movement, whichever the file has."""
    if not file.is_file():
        return {}
    tree = _read_json(file)

    def read() -> dict[str, Mismatch]:
        told = tree | tree.get("parts", {})
        return {name: _cell(told[name]) for name in (*CELLS, *PARTS) if name in told}

    return _checked(file, read)


def _cell(fields: Json) -> Mismatch:
    low, high = fields["ci95"]
    facts = {key: value for key, value in fields.items() if key not in ("abs_diff", "ci95")}
    mean = float(fields["abs_diff"])
    return Mismatch(abs_diff=mean, ci95=(float(low), float(high)), facts=facts)


def _seconds(file: Path) -> dict[str, float]:
    """Of each stage, all its lines together, in the order in which they first ended."""
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)

    def added() -> dict[str, float]:
        spent: dict[str, float] = {}
        for line in lines:
            if line.endswith("\n"):  # the last one may be being written
                fields = json.loads(line)
                spent[fields["stage"]] = spent.get(fields["stage"], 0.0) + float(fields["seconds"])
        return spent

    return _checked(file, added)


def _read_json(file: Path) -> Json:
    fields = _checked(file, lambda: json.loads(file.read_text(encoding="utf-8")))
    if not isinstance(fields, dict):
        raise UserError(f"{file} holds a {type(fields).__name__}; expected a JSON object")
    return fields


def _checked(file: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {error}); remove it, or run the stage "
            "that writes it again"
        ) from None

"""What a stage measured: rows of metrics.jsonl, TensorBoard's events, a line on the terminal.

    RUN/metrics.jsonl            one JSON object a step: stage, step, time, then names and numbers
    RUN/tensorboard/STAGE        the same numbers

A stage that goes on from step N cuts its own rows after N first: a step is told once. Knows names
and numbers, not what they mean; the names are in docs/training.md.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.text import Text

from t1jax.errors import UserError

FILE = "metrics.jsonl"
Row = Mapping[str, float | Sequence[float]]


class Metrics:
    """Takes one row a step. `shown` are the names whose numbers a person sees as they come."""

    def __init__(
        self,
        run: Path,
        stage: str,
        *,
        start: int,
        steps: int,
        shown: Sequence[str],
        writes: bool = True,
        stream: TextIO | None = None,
    ):
        """Cuts rows of `stage` from step `start` on.

        Args:
          run: the run's folder.
          stage: of the rows.
          start: the first step that will be told.
          steps: of the whole stage.
          shown: names to print.
          writes: False in all processes but one.
          stream: None: stderr.
        """
        self._stage, self._steps, self._shown = stage, steps, shown
        self._writes = writes
        self._console = Console(file=sys.stderr if stream is None else stream, soft_wrap=True)
        self._file: Any = None
        self._events: Any = None
        if writes:
            run.mkdir(parents=True, exist_ok=True)
            _cut(run / FILE, stage, start)
            self._file = (run / FILE).open("a", encoding="utf-8")
            self._events = _events(run / "tensorboard" / stage, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writes:
            self._file.close()
            self._events.close()

    def write(self, step: int, row: Row) -> None:
        """One step's numbers. What is not finite is null in JSON and absent from TensorBoard."""
        if not self._writes:
            return
        plain = {name: _plain(value) for name, value in row.items()}
        head = {"stage": self._stage, "step": step, "time": round(time.time(), 3)}
        self._file.write(json.dumps(head | plain, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in plain.items():
            if isinstance(value, float):
                self._events.add_scalar(name, value, step)
        self._show(step, plain)

    def note(self, line: str) -> None:
        """A line that is no step."""
        if self._writes:
            self._console.print(Text(f"{self._stage}: {line}"))

    def _show(self, step: int, row: Mapping[str, Any]) -> None:
        line = Text(f"{self._stage} {step + 1}/{self._steps}", style="bold")
        for name in self._shown:
            if isinstance(row.get(name), float):
                line.append(f"  {name} ", style="dim not bold")
                line.append(f"{row[name]:.4g}", style="cyan not bold")
        self._console.print(line)


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    number = float(value)
    return number if math.isfinite(number) else None


def _events(folder: Path, start: int) -> Any:
    from tensorboardX import SummaryWriter  # protobuf takes a second to import

    return SummaryWriter(os.fspath(folder), purge_step=start, flush_secs=10)


def _cut(file: Path, stage: str, start: int) -> None:
    """Drops the stage's rows from `start` on, and a line that a killed writer left torn."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and not _is_later(line, stage, start)]
    if kept != lines:
        aside = file.with_name(f"{file.name}.cut")
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(file)


def _is_later(line: str, stage: str, start: int) -> bool:
    row = json.loads(line)
    return bool(row["stage"] == stage and row["step"] >= start)


def read_metrics(run: Path, stage: str = "") -> list[dict[str, Any]]:
    """Rows of a run, of one stage if named, in order.

    Raises:
      UserError: the run has none.
    """
    file = run / FILE
    if not file.is_file():
        raise UserError(f"{file} does not exist; expected a run's folder, where a stage has begun")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if stage in ("", row["stage"])]

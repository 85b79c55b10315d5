"""The files of a finished evaluation: a line a trial, and a summary beside it. No jax here."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from t1jax.errors import UserError
from t1jax.pipeline.trials import Played

RESULTS, SUMMARY = "results.jsonl", "summary.json"


def write_results(file: Path, results: Sequence[Played]) -> None:
    """Writes lines, which appear together."""
    aside = file.with_name(file.name + ".incomplete")
    aside.write_text("".join(json.dumps(played.to_json()) + "\n" for played in results))
    os.replace(aside, file)


def read_results(folder: Path) -> list[Played]:
    """The lines of a finished evaluation.

    Raises:
      UserError: it is not finished, or a line is no result.
    """
    file = folder / RESULTS
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {file}: {error.strerror}; expected a finished evaluation"
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(Played.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{file}:{number} is no trial's result: {error}") from None
    return found

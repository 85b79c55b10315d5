"""A folder of trajectories as a list of what to train on: which are kept, and why others are not.

Reads only each trajectory's small document; arrays are read when a batch needs them.
"""

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from t1jax.errors import UserError
from t1jax.trajectory.io import DOCUMENT, INCOMPLETE, load_trajectory, read_document
from t1jax.trajectory.record import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One trajectory on disk."""

    path: str
    task: str
    reward: float
    tokens: tuple[int, ...]  # of each chunk

    def load(self) -> Trajectory:
        return load_trajectory(self.path)


def list_entries(
    *folders: str, keep: str, per_task: int, seed: int
) -> tuple[list[Entry], dict[str, int]]:
    """Trajectories below folders that are kept, sorted by path, and counts of all.

    Args:
      folders: hold trajectories, at any depth.
      keep: `solved`, or `all` that were graded.
      per_task: at most so many of one task, drawn by the seed; 0: all.
      seed: of that draw.

    Raises:
      UserError: no such folder, or nothing is kept; says how many were there and why not.
    """
    roots = [Path(folder) for folder in folders]
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root} is no directory; expected a folder of trajectories")
    counts: Counter[str] = Counter(found=0, ungraded=0, unsolved=0, over_per_task=0)
    by_task: dict[str, list[Entry]] = defaultdict(list)
    for path in sorted(file.parent for root in roots for file in root.rglob(DOCUMENT)):
        if path.name.endswith(INCOMPLETE):
            continue
        counts["found"] += 1
        document = read_document(path)
        reason = _left_out(document, keep)
        if reason:
            counts[reason] += 1
        else:
            by_task[document["task"]].append(_entry(path, document))
    kept = [entry for task in sorted(by_task) for entry in _some(by_task[task], per_task, seed)]
    counts["over_per_task"] = sum(map(len, by_task.values())) - len(kept)
    counts["kept"] = len(kept)
    if not kept:
        where = ", ".join(map(str, roots))
        raise UserError(f"{where}: there is no trajectory to train on: {_tell(counts)}")
    return sorted(kept, key=lambda entry: entry.path), dict(counts)


def _left_out(document: dict[str, Any], keep: str) -> str:
    if document["reward"] is None:
        return "ungraded"
    return "unsolved" if keep == "solved" and document["outcome"] != "solved" else ""


def _entry(path: Path, document: dict[str, Any]) -> Entry:
    return Entry(
        path=str(path),
        task=document["task"],
        reward=document["reward"],
        tokens=tuple(chunk["tokens"] for chunk in document["chunks"]),
    )


def _some(entries: list[Entry], per_task: int, seed: int) -> list[Entry]:
    if per_task == 0 or len(entries) <= per_task:
        return entries
    chosen = np.random.default_rng(seed).permutation(len(entries))[:per_task]
    return [entries[i] for i in sorted(chosen)]


def _tell(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())

"""How the recorded routes of an evaluation spread tokens over experts. Reads trajectories only."""

import dataclasses

import numpy as np

from t1jax.evaluation.run_folder import EVALUATED, Evaluation, RunFolder
from t1jax.trajectory.io import DOCUMENT, load_trajectory
from t1jax.trajectory.record import Chunk

MOST_TOKENS = 200_000  # enough for shares of a thousandth, and read in seconds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """Tokens of each expert of each layer."""

    counts: np.ndarray  # [L, E]
    trajectories: int
    tokens: int
    evaluation: str

    @property
    def excess(self) -> np.ndarray:
        """Tokens over an even share, [L, E]: 1 is even."""
        whole = np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return self.counts / whole * self.counts.shape[1]


def expert_load(run: RunFolder) -> Load | None:
    """Of the last usual evaluation that has trajectories with routes; None where none has."""
    for name in reversed(EVALUATED):
        found = _load(run.evaluations[name]) if name in run.evaluations else None
        if found is not None:
            return found
    return None


def _load(evaluation: Evaluation) -> Load | None:
    counts: np.ndarray | None = None
    trajectories = tokens = 0
    for file in sorted(evaluation.folder.glob(f"*/*/{DOCUMENT}")):
        if tokens >= MOST_TOKENS:
            break
        chunks = [c for c in load_trajectory(file.parent).chunks if c.recorded.any()]
        for chunk in chunks:
            told = _count(chunk)
            counts = told if counts is None else counts + told
        trajectories += bool(chunks)
        tokens += sum(int(chunk.recorded.sum()) for chunk in chunks)
    if counts is None:
        return None
    return Load(counts=counts, trajectories=trajectories, tokens=tokens, evaluation=evaluation.name)


def _count(chunk: Chunk) -> np.ndarray:
    """Rows of this chunk that went to each expert, [L, E]."""
    known = chunk.routes[chunk.recorded]
    return np.stack([
        np.bincount(known[:, layer].ravel(), minlength=chunk.shape.experts)
        for layer in range(chunk.shape.layers)
    ])  # fmt: skip

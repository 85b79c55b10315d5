"""How a stage gets its batches: packed by this process's feed, placed while one is trained on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from t1jax.config import BatchSection
from t1jax.data.packing import NO_ROUTES
from t1jax.data.pipeline import Feed, Prepared
from t1jax.errors import UserError
from t1jax.pipeline.learning import Setup
from t1jax.pipeline.place import Placer, rows_of_process
from t1jax.rl.inputs import Batch


def make_feed(setup: Setup, batch: BatchSection, *, routed: bool) -> Feed:
    """How this process packs trajectories, with or without their routes."""
    return Feed(
        tokens=batch.tokens,
        rows=batch.rows,
        packs=batch.packed,
        too_long=batch.too_long,
        mine=rows_of_process(setup.run, batch.rows),
        shape=setup.shape if routed else NO_ROUTES,
    )


def read_ahead(
    batches: Iterator[Prepared], placer: Placer, tokens: int
) -> Iterator[tuple[Prepared, list[Batch]]]:
    """Batches on the devices; the next one is on its way while one is trained on."""
    waiting: tuple[Prepared, list[Batch]] | None = None
    for prepared in batches:
        if not prepared.packed:
            raise UserError(
                f"none of a batch's {prepared.facts['chunks_too_long']:.0f} chunks fits in a row "
                f"of batch.tokens={tokens}; raise it"
            )
        placed = [placer.batch(packed) for packed in prepared.packed]
        if waiting is not None:
            yield waiting
        waiting = prepared, placed
    if waiting is not None:
        yield waiting


def dump(prepared: Prepared, folder: Path) -> None:
    """Writes a batch's arrays, as the step got them."""
    for number, packed in enumerate(prepared.packed):
        np.savez(folder / f"micro-batch-{number}.npz", **vars(packed))

"""Batches of recorded trajectories, in a seeded order that a restart meets again exactly.

    batches = epochs(entries, ..., seed=0)        # a grain dataset: batches[k] is the k-th batch
    for k, batch in enumerate(reader(batches, feed, start, workers=2), start): ...

Every epoch is shuffled anew. The order and the arrangement into rows are the same in every process
and for any number of processes; each reads and fills only its own rows. A batch depends on its
number alone, so the number of batches taken is the whole state of the data. (grain imports jax
where that is installed; nothing here does.)
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
from absl import flags

from t1jax.data.folder import Entry
from t1jax.data.packing import (
    NO_ROUTES,
    MicroBatch,
    Packed,
    Piece,
    arrange,
    efficiency,
    fill,
    pieces_of,
)
from t1jax.trajectory.record import RouteShape, Trajectory

READ_AHEAD = 4  # batches that threads or processes prepare while one is trained on


class Prepared(NamedTuple):
    """One global batch: this process's rows of each micro-batch, and facts about the whole."""

    packed: tuple[Packed, ...]
    facts: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feed:
    """How trajectories become the rows that one process needs. A grain map: it is pickled."""

    tokens: int
    rows: int
    packs: bool
    too_long: str
    mine: slice  # of a micro-batch's rows
    shape: RouteShape = NO_ROUTES

    def __call__(self, batch: Sequence[Entry]) -> Prepared:
        """Reads what this process's rows need of the batch."""
        where = [(entry, n) for entry in batch for n in range(len(entry.tokens))]
        if self.too_long == "leave_out":
            where = [(entry, n) for entry, n in where if entry.tokens[n] <= self.tokens]
        lengths = [entry.tokens[n] for entry, n in where]
        plan = self.arranged([min(length, self.tokens) for length in lengths])
        pieces: dict[int, Piece] = {}
        loaded: dict[str, Trajectory] = {}
        for number in (n for micro in plan for row in micro.rows[self.mine] for n in row):
            entry, chunk = where[number]
            if entry.path not in loaded:
                loaded[entry.path] = entry.load()
            pieces[number] = _piece(entry, loaded[entry.path], chunk, self)
        chunks = sum(len(entry.tokens) for entry in batch)
        facts = {
            "trajectories": float(len(batch)),
            "packing_efficiency": efficiency(plan, lengths) if plan else 0.0,
            "chunks_too_long": float(chunks - len(where)),
        }
        return Prepared(tuple(fill(m, pieces, self.shape, self.mine) for m in plan), facts)

    def arranged(self, lengths: Sequence[int]) -> tuple[MicroBatch, ...]:
        return arrange(lengths, tokens=self.tokens, rows=self.rows, packed=self.packs)

    def of(self, trajectories: Sequence[tuple[str, Trajectory]]) -> tuple[list[Piece], Prepared]:
        """Trajectories that are in memory, such as a rollout's; the pieces in their order."""
        pieces, left_out = pieces_of(trajectories, tokens=self.tokens, too_long=self.too_long)
        lengths = [len(piece.chunk) for piece in pieces]
        plan = self.arranged(lengths)
        packed = tuple(fill(micro, pieces, self.shape, self.mine) for micro in plan)
        facts = {f"chunks_{name}": float(number) for name, number in left_out.items()}
        facts["packing_efficiency"] = efficiency(plan, lengths) if plan else 0.0
        return pieces, Prepared(packed, facts)


def _piece(entry: Entry, trajectory: Trajectory, number: int, feed: Feed) -> Piece:
    """One chunk, with the checks of `pieces_of`; where nothing was sampled it stays as context."""
    chunk = trajectory.chunks[number]
    alone = dataclasses.replace(trajectory, chunks=(chunk,))
    pieces_of([(f"{entry.path}, chunk {number}", alone)], tokens=feed.tokens, too_long="error")
    return Piece(entry.path, chunk, entry.reward)


def epochs(
    entries: Sequence[Entry], *, batch_trajectories: int, count: int, seed: int
) -> grain.MapDataset:
    """Lists of entries. Each epoch has every trajectory once; its last batch is short."""
    source = grain.MapDataset.source(entries).seed(seed).shuffle()
    batches = source.batch(batch_trajectories, drop_remainder=False, batch_fn=list)
    return batches.repeat(count)


def reader(
    batches: grain.MapDataset, feed: Feed, start: int, *, workers: int
) -> Iterator[Prepared]:
    """Batches from number `start` on, prepared ahead by threads or by so many processes."""
    rest = batches.slice(slice(start, None)).map(feed)
    if workers == 0:
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=READ_AHEAD)
        return iter(rest.to_iter_dataset(ahead))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain's processes read absl's flags, which nothing else does
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
    reads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(rest.to_iter_dataset(reads).mp_prefetch(options))

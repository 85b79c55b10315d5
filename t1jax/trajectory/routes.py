"""Recorded routes on the host: their checks, and the dispatch plans that follow from them.

Routes are [L, B, T, C] expert ids. Which rows were recorded is a mask, never an id; files may mark
a missing row with -1, which `split_missing` turns into the mask. Knows nothing of devices.
"""

import math

import numpy as np

STRATEGIES = ("gather", "ragged_all_to_all")


def split_missing(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Separates ids from validity: rows of -1 (all C of them) are missing.

    Args:
      ids: signed integers [..., C]; a row is C distinct ids in 0..experts-1, or C times -1.
      experts: E.

    Returns:
      ids in the smallest unsigned dtype that holds E - 1 (0 where missing), and bool [...] that
      says which rows were recorded.

    Raises:
      ValueError: see `check`.
    """
    recorded = ~(ids == -1).all(axis=-1)
    check(ids, experts, recorded)
    dtype = np.uint8 if experts <= 256 else np.uint16
    return np.where(recorded[..., None], ids, 0).astype(dtype), recorded


def check(ids: np.ndarray, experts: int, recorded: np.ndarray | None = None) -> None:
    """Refuses routes that cannot be what a router chose, naming row, token and layer.

    Args:
      ids: [L, B, T, C], any integer dtype.
      experts: E.
      recorded: bool [L, B, T], rows that count; None: all.

    Raises:
      ValueError: an id outside 0..E-1, or a duplicate within a row (a layer that was never written
        is one: its rows are all zeros).
    """
    recorded = np.ones(ids.shape[:-1], bool) if recorded is None else recorded
    outside = ((ids < 0) | (ids >= experts)).any(axis=-1) & recorded
    _refuse(outside, ids, f"an expert outside 0..{experts - 1}")
    ordered = np.sort(ids, axis=-1)
    _refuse((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & recorded, ids, "an expert twice")


def _refuse(bad: np.ndarray, ids: np.ndarray, what: str) -> None:
    if not bad.any():
        return
    layer, row, token = (int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"routes: row {row}, token {token}, layer {layer} names {what}: "
        f"{ids[layer, row, token].tolist()} ({int(bad.sum())} such rows in all); expected "
        f"{ids.shape[-1]} distinct expert ids. Check the recorder, and that axes are "
        "[token, layer, choice]"
    )


def plan_dispatch(
    ids: np.ndarray,
    valid: np.ndarray,
    *,
    experts: int,
    replicas: int = 1,
    expert_shards: int = 1,
    context_shards: int = 1,
    strategy: str = "gather",
    row_padding: int = 0,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Where each routed copy goes, for routes known beforehand: what the device would sort out.

    Args:
      ids: [L, B, T, C] expert ids, of all rows of the batch on this mesh.
      valid: bool [B, T], False for padding, which visits no expert.
      experts: E.
      replicas: data x fsdp parts of the rows. Rows are split in replicas x expert_shards.
      expert_shards, context_shards: parts of the experts, and of the positions.
      strategy: one of STRATEGIES (t1jax.model.moe).
      row_padding: rows that the grouped matmul wants after the last one.

    Returns:
      order int32 [L, shards, rows]: the copy in each row, sorted by expert, copy c of token p being
      p * C + c and a row without a copy holding one more than the last copy's number;
      sizes int32 [L, shards, E or E / expert_shards]; and the rows that the fullest shard receives
      (for ragged_all_to_all), rounded up so that few sizes occur.
    """
    layers, B, T, C = ids.shape
    rows, positions = B // (replicas * expert_shards), T // context_shards
    if rows * replicas * expert_shards != B or positions * context_shards != T:
        raise ValueError(
            f"routes of {B} rows x {T} positions do not divide into {replicas} replicas x "
            f"{expert_shards} expert shards and {context_shards} context shards"
        )
    ids = np.where(valid[None, :, :, None], ids, experts).astype(np.int32)
    # [L, replica, expert shard, context shard, copies of that shard's tokens]
    copies = (
        ids.reshape(layers, replicas, expert_shards, rows, context_shards, positions, C)
        .transpose(0, 1, 2, 4, 3, 5, 6)
        .reshape(layers, replicas, expert_shards, context_shards, -1)
    )
    if strategy == "gather":
        return _gathered(copies, experts, row_padding)
    return _exchanged(copies, experts)


def _gathered(
    copies: np.ndarray, experts: int, row_padding: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Every expert shard sees the copies of its whole group and keeps its own experts'."""
    layers, replicas, shards, contexts, _ = copies.shape
    group = np.moveaxis(copies, 2, 3).reshape(layers, replicas, contexts, -1)
    order = np.argsort(group, axis=-1, kind="stable").astype(np.int32)
    sizes = _counts(group, experts).reshape(layers, replicas, contexts, shards, -1)
    local = sizes.sum(axis=-1)
    starts = np.cumsum(local, axis=-1) - local
    room = round_rows(int(local.max()), group.shape[-1]) + row_padding
    place = starts[..., None] + np.arange(room)
    mine = np.arange(room) < local[..., None]
    order = np.take_along_axis(
        order[..., None, :], np.minimum(place, group.shape[-1] - 1), axis=-1
    )
    order = np.where(mine, order, group.shape[-1]).astype(np.int32)
    by_shard = lambda x: np.moveaxis(x, 3, 2).reshape(layers, -1, x.shape[-1])  # noqa: E731
    return by_shard(order), by_shard(sizes), room


def _exchanged(copies: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Every shard sorts its own copies by expert; the fullest receiver sets the room."""
    layers, _, shards, _, count = copies.shape
    order = np.argsort(copies, axis=-1, kind="stable").astype(np.int32)
    sizes = _counts(copies, experts)
    real = np.arange(count) < sizes.sum(axis=-1, keepdims=True)
    order = np.where(real, order, count).astype(np.int32)
    received = sizes.reshape(*sizes.shape[:-1], shards, -1).sum(axis=(2, -1))
    room = round_rows(int(received.max()), count * shards)
    flat = lambda x: x.reshape(layers, -1, x.shape[-1])  # noqa: E731
    return flat(order), flat(sizes), room


def _counts(copies: np.ndarray, experts: int) -> np.ndarray:
    """Copies per expert over the last axis; the id `experts` (padding) is not counted."""
    flat = copies.reshape(-1, copies.shape[-1])
    offset = np.arange(len(flat))[:, None] * (experts + 1)
    counts = np.bincount((flat + offset).reshape(-1), minlength=len(flat) * (experts + 1))
    shape = (*copies.shape[:-1], experts + 1)
    return counts.reshape(shape)[..., :-1].astype(np.int32)


def round_rows(rows: int, most: int) -> int:
    """`rows` rounded up to one of 8 sizes per doubling (waste at most 1/8), at most `most`."""
    if rows <= 64:
        return min(64, most)
    step = 2 ** (math.ceil(math.log2(rows)) - 4)
    return min(-(-rows // step) * step, most)

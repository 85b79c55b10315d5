"""Recorded routes on the host: their type, checks and merging, and the dispatch plans they imply.

A record holds routes as [T, L, C]: token, layer, choice; plans take them layer-major, [L, B, T, C].
Ids are the smallest unsigned type that holds E - 1. Which tokens were recorded is a mask, never an
id; engines that mark a missing row with -1 are read by `split_missing`. Knows nothing of devices.
"""

import math

import numpy as np

STRATEGIES = ("gather", "ragged_all_to_all")
BLOCK_TOKENS = 2048  # checked at a time: the copies stay in the processor's cache
DEAD_ROWS = 32  # with one choice per token, so many zeros in a row mean that nothing was written


def dtype_for(experts: int) -> np.dtype:
    """The smallest unsigned type that can name every expert."""
    return np.min_scalar_type(max(experts - 1, 0))


def split_missing(signed: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Separates ids from validity: a row of -1 (all C of them) was not recorded.

    A token counts as recorded where every layer was; with any layer missing the whole token is.

    Args:
      signed: integers [T, L, C]; a row is C distinct ids in 0..E-1, or C times -1.
      experts: E.

    Returns:
      ids [T, L, C] in the smallest unsigned type (0 where missing), and bool [T].

    Raises:
      ValueError: a row that mixes -1 with ids, and what `check` refuses.
    """
    absent = signed == -1
    missing = absent.all(axis=-1)
    _refuse(absent.any(axis=-1) & ~missing, signed, "only some of its experts")
    recorded = ~missing.any(axis=-1)
    ids = narrow(signed, recorded, experts)
    check(ids, recorded, experts)
    return ids, recorded


def narrow(wide: np.ndarray, recorded: np.ndarray, experts: int, first: int = 0) -> np.ndarray:
    """Ids [T, L, C] of any integer type in the smallest one; 0 where not recorded.

    Raises:
      ValueError: an id of a recorded token lies outside 0..E-1, so that the cast would change it.
    """
    dtype = dtype_for(experts)
    if wide.dtype == dtype and recorded.all():
        return np.ascontiguousarray(wide)
    outside = ((wide < 0) | (wide >= experts)).any(axis=-1) & recorded[:, None]
    _refuse(outside, wide, f"an expert outside 0..{experts - 1}", first)
    return np.where(recorded[:, None, None], wide, 0).astype(dtype)


def check(ids: np.ndarray, recorded: np.ndarray, experts: int) -> None:
    """Refuses routes that cannot be what a router chose, naming token and layer.

    Args:
      ids: [T, L, C], unsigned.
      recorded: bool [T], tokens that count.
      experts: E.

    Raises:
      ValueError: an id of E or more, an expert twice in a row, or a layer of zeros throughout,
        which was never written.
    """
    _refuse_dead_layers(ids, recorded)
    for first in range(0, len(ids), BLOCK_TOKENS):
        block = ids[first : first + BLOCK_TOKENS]
        counts = recorded[first : first + BLOCK_TOKENS, None]
        if block.size and int(block.max()) >= experts:
            outside = (block >= experts).any(axis=-1) & counts
            _refuse(outside, block, f"an expert outside 0..{experts - 1}", first)
        _refuse(_with_duplicates(block) & counts, block, "an expert twice", first)


def _with_duplicates(block: np.ndarray) -> np.ndarray:
    """Which rows name an expert twice: all pairs of columns, each contiguous (10x a sort)."""
    T, L, C = block.shape
    columns = np.ascontiguousarray(block.reshape(T * L, C).T)
    twice, equal = np.zeros((2, T * L), bool)
    for j in range(1, C):
        for i in range(j):
            np.equal(columns[i], columns[j], out=equal)
            np.logical_or(twice, equal, out=twice)
    return twice.reshape(T, L)


def _refuse_dead_layers(ids: np.ndarray, recorded: np.ndarray) -> None:
    T, _, C = ids.shape
    if not recorded.any() or not ids.size or (C == 1 and T < DEAD_ROWS):
        return
    first = int(np.argmax(recorded))
    for layer in np.flatnonzero(~ids[first].any(axis=-1)):
        if not ids[recorded, layer].any():
            raise ValueError(
                f"routes: layer {layer} is 0 from token {first} on, for all {int(recorded.sum())} "
                "recorded tokens: it was never written. Check that the recorder covers every layer"
            )


def _refuse(bad: np.ndarray, ids: np.ndarray, what: str, first: int = 0) -> None:
    if not bad.any():
        return
    token, layer = (int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"routes: token {first + token}, layer {layer} names {what}: {ids[token, layer].tolist()}; "
        f"expected {ids.shape[-1]} distinct expert ids. Check the recorder, and that axes are "
        "[token, layer, choice]"
    )


def merge(
    earlier: tuple[np.ndarray, np.ndarray], later: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Routes of one stream from two requests, the later of which began with the earlier's tokens.

    A row that both have stays the earlier's: its log-probs were computed with it. The row of the
    last token that the earlier request sampled comes from the later, which read it first.

    Args:
      earlier, later: (ids [T, L, C], recorded [T]); the later has at least as many rows.
    """
    (ids, recorded), (later_ids, later_recorded) = earlier, later
    if len(ids) > len(later_ids) or ids.shape[1:] != later_ids.shape[1:]:
        raise ValueError(
            f"routes of shape {ids.shape} are no beginning of routes of shape {later_ids.shape}; "
            "expected the later request to hold at least the earlier one's rows"
        )
    merged, merged_recorded = later_ids.copy(), later_recorded.copy()
    merged[: len(ids)][recorded] = ids[recorded]
    merged_recorded[: len(ids)] |= recorded
    return merged, merged_recorded


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

"""A recorded stream as it would be had its text been encoded again: token-in-token-out's ablation.

Tokens of structure keep their ids. The text between two of them, the last words of a header and
what was sampled after them included, is decoded and encoded as one stretch, as a chat template
does. Where both splits have a token of the same bytes in the same place, it keeps its column.
Elsewhere the ids changed:

    sampled text    its new tokens are marked as sampled and share its log-prob evenly; the first
                    stands for all its sampled tokens, the others for none: only their sum can be
                    compared with a trainer's
    given text      stays given
    both            a token over the edge of a turn: given, and its sampled tokens are `lost`

No route was recorded for a token whose id changed. The template's other rewriting (reasoning it
drops, white space it strips) is left out: ids differ here, never the text, up to the tokenizer's
normalizer and bytes that are no UTF-8.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import Chunk, Turn


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Retokenised:
    """The stream with other ids, and what became of the sampled ones."""

    chunk: Chunk
    # [N] int32: for how many sampled tokens of the record each token stands; the first of a changed
    # stretch for all of the stretch's.
    stands_for: np.ndarray
    changed: int  # sampled tokens whose ids did not come back
    lost: int  # of those, over the edge of a turn: they are sampled no more


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """Old tokens begin..end-1 became `ids`; the same ones, or none of them."""

    begin: int
    end: int
    ids: np.ndarray
    same: bool


def retokenise(chunk: Chunk, chat: Chat) -> Retokenised:
    """Encodes a stream's text again. See the module."""
    blocks = list(_blocks(chunk.ids, chat))
    begins = np.cumsum([0, *(len(block.ids) for block in blocks)])
    columns: dict[str, Any] = {
        "ids": np.concatenate([block.ids for block in blocks]).astype(np.int32),
        "mask": np.zeros(begins[-1], bool),
        "logprobs": np.zeros(begins[-1], np.float32),
        "versions": np.zeros(begins[-1], np.int32),
        "routes": np.zeros((begins[-1] - 1, *chunk.routes.shape[1:]), chunk.routes.dtype),
        "recorded": np.zeros(begins[-1] - 1, bool),
    }
    stands_for = np.zeros(begins[-1], np.int32)
    changed = lost = 0
    for block, begin in zip(blocks, begins.tolist(), strict=False):
        if block.same:
            _keep(chunk, block, columns, begin)
            stands_for[begin : begin + len(block.ids)] = chunk.mask[block.begin : block.end]
            continue
        sampled = chunk.mask[block.begin : block.end]
        changed += int(sampled.sum())
        place = slice(begin, begin + len(block.ids))
        columns["versions"][place] = chunk.versions[block.begin]
        if sampled.all() and len(block.ids):
            total = chunk.logprobs[block.begin : block.end].sum()
            columns["mask"][place] = True
            columns["logprobs"][place] = total / len(block.ids)
            stands_for[begin] = sampled.sum()
        else:
            lost += int(sampled.sum())
    turns = _moved(chunk, blocks, begins)
    new = dataclasses.replace(chunk, turns=turns, **columns)
    return Retokenised(chunk=new, stands_for=stands_for, changed=changed, lost=lost)


def _keep(chunk: Chunk, block: _Block, columns: dict[str, np.ndarray], begin: int) -> None:
    """Copies a block's columns to their new place."""
    for name, column in columns.items():
        old = getattr(chunk, name)[block.begin : block.end]
        room = column[begin : begin + len(old)]  # a stream's last token has no route
        room[:] = old[: len(room)]


def _moved(chunk: Chunk, blocks: list[_Block], begins: np.ndarray) -> tuple[Turn, ...]:
    """The turns; an edge inside a changed block moves to the block's end."""
    where = np.empty(len(chunk) + 1, np.int64)
    for block, begin in zip(blocks, begins.tolist(), strict=False):
        where[block.begin : block.end] = begin + len(block.ids)
        if block.same:
            where[block.begin : block.end] = begin + np.arange(len(block.ids))
        where[block.begin] = begin
    where[-1] = begins[-1]
    at = where.tolist()
    return tuple(
        dataclasses.replace(t, begin=at[t.begin], sampled=at[t.sampled], end=at[t.end])
        for t in chunk.turns
    )


def _blocks(ids: np.ndarray, chat: Chat) -> Iterator[_Block]:
    """The whole stream in blocks: structure as it is, and each stretch of text encoded again."""
    structure = np.isin(ids, list(chat.added_ids))
    edges = np.flatnonzero(np.diff(structure)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(ids)], strict=True):
        old = ids[begin:end]
        if structure[begin]:
            yield _Block(begin=begin, end=end, ids=old, same=True)
            continue
        for i, j, new in _aligned(old, chat.encode_text(chat.decode(old)), chat):
            same = np.array_equal(old[i:j], new)
            yield _Block(begin=begin + i, end=begin + j, ids=new, same=same)


def _aligned(old: np.ndarray, new: np.ndarray, chat: Chat) -> Iterator[tuple[int, int, np.ndarray]]:
    """Old tokens i..j-1 and the new ones for the same bytes, as short as can be told."""
    if np.array_equal(old, new):
        yield 0, len(old), new
        return
    first, cuts = _bytes(old, chat)
    second, new_cuts = _bytes(new, chat)
    head = _common(first, second)
    tail = min(_common(first[::-1], second[::-1]), len(first) - head, len(second) - head)
    shift = len(second) - len(first)
    # Byte positions that end a token in both splits, of the old stretch.
    begun = np.intersect1d(cuts, new_cuts)
    ended = np.intersect1d(cuts, new_cuts - shift)
    shared = [*begun[begun <= head], *ended[ended >= len(first) - tail]]
    pairs = sorted({(int(at), int(at) + (shift if at > head else 0)) for at in shared})
    for (a, c), (b, d) in itertools.pairwise(pairs):
        i, j = np.searchsorted(cuts, (a, b)).tolist()
        k, n = np.searchsorted(new_cuts, (c, d)).tolist()
        yield i, j, new[k:n]


def _bytes(ids: np.ndarray, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
    """The stretch, a character of a byte-level vocabulary for each byte; where its tokens end."""
    tokens = [chat.tokenizer.id_to_token(int(token)) or "" for token in ids]
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    return characters, np.cumsum([0, *map(len, tokens)])


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading bytes are equal."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(np.argmax(differ)) if differ.any() else length

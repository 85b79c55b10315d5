"""Parts: which view of a published tensor fills which block of a parameter, and the copying.

Knows neither names nor models; `huggingface.table` makes the parts.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from t1jax.checkpoint.tensor_files import bits
from t1jax.checkpoint.trees import Path

View = Callable[[np.ndarray], np.ndarray]
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A view of one published tensor, and where it goes in the parameter.

    The view is made of slices, reshapes and transposes: no arithmetic and no copy.
    `where` fixes the parameter's leading axes: a position, or None for the whole axis.
    """

    tensor: str
    shape: tuple[int, ...]  # of the published tensor
    view: View
    where: tuple[int | None, ...] = ()

    @property
    def index(self) -> Index:
        """`where` as numpy writes it."""
        return tuple(slice(None) if at is None else at for at in self.where)


Table = dict[Path, tuple[Part, ...]]
Use = tuple[Path, Part]  # a parameter and the part of it that a tensor fills


def fill(
    out: np.ndarray,
    starts: tuple[int, ...],
    parts: Iterable[Part],
    read: Callable[[str], np.ndarray],
) -> None:
    """Fills a block of a parameter, whose first element stands at `starts`, from its parts.

    Reads no tensor that has nothing in the block, and of the others only what the block needs.
    """
    for part in parts:
        fixed = list(part.where) + [None] * (out.ndim - len(part.where))
        spans = list(zip(fixed, starts, out.shape, strict=True))
        if any(at is not None and not first <= at < first + size for at, first, size in spans):
            continue
        target = tuple(slice(None) if at is None else at - first for at, first, _ in spans)
        wanted = tuple(slice(first, first + size) for at, first, size in spans if at is None)
        copy(bits(out)[target], part.view(bits(read(part.tensor)))[wanted])


def assemble(uses: list[Use], read: Callable[[Path, Index], np.ndarray]) -> np.ndarray:
    """A published tensor from the parameters that hold it; `read` gives part of a parameter."""
    out: np.ndarray | None = None
    for path, part in uses:
        values = read(path, part.index)
        if out is None:
            out = np.empty(part.shape, values.dtype)
        copy(part.view(bits(out)), bits(values))
    assert out is not None, "a published tensor that no parameter holds"
    return out


TILE_ROWS, TILE_COLUMNS = 1024, 256  # of the source, in a transposed copy


def copy(to: np.ndarray, values: np.ndarray) -> None:
    """`to[...] = values`, several times as fast as numpy where their memory runs across."""
    if to.ndim < 2 or _inner(to) == _inner(values):
        to[...] = values
        return
    across = (_inner(values), _inner(to)), (-2, -1)
    to, values = np.moveaxis(to, *across), np.moveaxis(values, *across)
    for matrix in np.ndindex(to.shape[:-2]):
        _transpose(to[matrix], values[matrix].T)


def _transpose(to: np.ndarray, source: np.ndarray) -> None:
    """`to[...] = source.T` for a row-major source, tile by tile, moving 8 bytes at a time.

    Transposes words of several neighbours first (fewer strided reads), then the neighbours within
    the words, while the tile is in the cache.
    """
    wide = 8 // source.itemsize
    for top in range(0, source.shape[0], TILE_ROWS):
        for left in range(0, source.shape[1], TILE_COLUMNS):
            tile = source[top : top + TILE_ROWS, left : left + TILE_COLUMNS]
            rows, columns = tile.shape
            target = to[left : left + columns, top : top + rows]
            if columns % wide or tile.strides[1] != tile.itemsize:
                target[...] = tile.T
                continue
            # Rows a power of two apart would meet in the same few cache lines: one word more.
            padded = np.empty((rows, columns // wide + 1), np.uint64)[:, :-1]
            padded[...] = tile.view(np.uint64)
            words = np.ascontiguousarray(padded.T)
            neighbours = words.view(tile.dtype).reshape(columns // wide, rows, wide)
            target.reshape(columns // wide, wide, rows)[...] = neighbours.transpose(0, 2, 1)


def _inner(array: np.ndarray) -> int:
    """The axis along which neighbours lie closest in memory."""
    strides = [
        stride if size > 1 else np.inf
        for stride, size in zip(array.strides, array.shape, strict=True)
    ]
    return int(np.argmin(strides))

"""Parameters on disk: an orbax tree written chunk by chunk, straight from the source's files.

Orbax saves arrays that are in memory; a stacked tensor of the 122B model is 39 GB. So its leaves
here are descriptions (`Parameter`), and a handler of ours writes each one's chunks as orbax's own
uncompressed zarr arrays. Orbax writes everything else, and reads it all back with its own handlers.

A chunk is one file and never spans layers. Its other sides follow `Parameter.shard`: what one
device of the mesh given to `convert` will read.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from t1jax.checkpoint.parts import Part, fill
from t1jax.checkpoint.tensor_files import is_local
from t1jax.checkpoint.trees import Path
from t1jax.checkpoint.writing import WriteBehind
from t1jax.errors import UserError
from t1jax.progress import Progress

CHUNK_BYTES = 16 * 2**20  # at most; a writer holds one chunk in memory
WRITERS = 4  # threads at most: more than the disk keeps up with
# Where the published tensors' rows go: cutting here keeps what a chunk reads in one piece.
CUT_FIRST = ("experts", "vocab", "heads", "value_heads", "key_heads", "kv_heads")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parameter:
    """A parameter to be written: what it is, and the parts it comes from."""

    path: Path
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source_dtype: np.dtype
    dtype: np.dtype
    shard: tuple[int, ...]  # the shape that one device will hold

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def chunk(self) -> tuple[int, ...]:
        """A shape that divides `shard`, spans one layer and has at most CHUNK_BYTES, if it can."""
        named = zip(self.axes, self.shard, strict=True)
        sides = [1 if axis == "groups" else size for axis, size in named]
        fits = CHUNK_BYTES // self.dtype.itemsize
        for axis in sorted(range(len(sides)), key=self._reluctance):
            while math.prod(sides) > fits and sides[axis] > 1:
                sides[axis] //= _smallest_factor(sides[axis])
        return tuple(sides)

    @functools.cached_property
    def _by_layer(self) -> dict[int | None, list[Part]]:
        """Parts of each layer: a chunk looks through those of its own only."""
        found: dict[int | None, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.where[0] if part.where else None, []).append(part)
        return found

    def _reluctance(self, axis: int) -> tuple[int, int]:
        name = self.axes[axis]
        return (CUT_FIRST.index(name) if name in CUT_FIRST else len(CUT_FIRST), axis)

    def block(self, starts: tuple[int, ...], read: "Read", memory: np.ndarray) -> np.ndarray:
        """The chunk that begins at `starts`, made in `memory` if no cast is needed."""
        count = math.prod(self.chunk) * self.source_dtype.itemsize
        out = memory[:count].view(self.source_dtype).reshape(self.chunk)
        layer = starts[0] if self.axes[:1] == ("groups",) else None
        fill(out, starts, self._by_layer[layer], read)
        return out.astype(self.dtype, copy=False)

    def describe(self) -> dict[str, Any]:
        """The zarr (version 2) metadata that orbax writes for an uncompressed array."""
        bfloat16 = self.dtype == np.dtype("bfloat16")
        return {
            "zarr_format": 2,
            "shape": self.shape,
            "chunks": self.chunk,
            "dtype": "bfloat16" if bfloat16 else self.dtype.str,
            "compressor": None,
            "dimension_separator": ".",
            "fill_value": None,
            "filters": None,
            "order": "C",
        }


Read = Callable[[str], np.ndarray]  # a published tensor by name


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of one parameter."""

    parameter: Parameter
    starts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its file's name: its place in the grid of chunks."""
        sides = zip(self.starts, self.parameter.chunk, strict=True)
        return ".".join(str(start // size) for start, size in sides) or "0"

    @property
    def nbytes(self) -> int:
        return math.prod(self.parameter.chunk) * self.parameter.dtype.itemsize


def chunks_by_layer(parameters: Sequence[Parameter]) -> list[Chunk]:
    """All chunks in the order in which published files hold them, so that each is read once."""
    placed = []
    for number, parameter in enumerate(parameters):
        sides = zip(parameter.shape, parameter.chunk, strict=True)
        for starts in itertools.product(*(range(0, whole, size) for whole, size in sides)):
            group = starts[0] if parameter.axes[:1] == ("groups",) else -1
            placed.append((group, number, Chunk(parameter, starts)))
    return [chunk for *_, chunk in sorted(placed, key=lambda entry: entry[:2])]


def for_each_chunk(
    parameters: Sequence[Parameter],
    read: Read,
    use: Callable[[Chunk, np.ndarray], None],
    progress: Progress,
) -> None:
    """Makes every chunk from the source and hands it to `use`, on several threads."""
    mine = threading.local()
    largest = max(math.prod(p.chunk) * p.source_dtype.itemsize for p in parameters)

    def work(chunk: Chunk) -> int:
        # Memory is used again: fresh pages cost more than the copying that fills them.
        if not hasattr(mine, "memory"):
            mine.memory = np.empty(largest, np.uint8)
        use(chunk, chunk.parameter.block(chunk.starts, read, mine.memory))
        return chunk.nbytes

    with concurrent.futures.ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as pool:
        try:
            for nbytes in pool.map(work, chunks_by_layer(parameters)):
                progress.advance(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Writer(ocp.type_handlers.TypeHandler):
    """Writes `Parameter` leaves where orbax would write arrays."""

    def __init__(self, read: Read, progress: Progress):
        self._read, self._progress = read, progress

    def typestr(self) -> str:
        # As plain arrays: without a target they restore to numpy, with one to sharded jax arrays.
        return "np.ndarray"

    async def serialize(
        self,
        values: Sequence[Parameter],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        folders: dict[Path, epath.Path] = {}
        for parameter, info in zip(values, infos, strict=True):
            folder = info.parent_dir / info.name
            folder.mkdir()
            (folder / ".zarray").write_text(json.dumps(parameter.describe()))
            folders[parameter.path] = folder

        with WriteBehind() as files:

            def write(chunk: Chunk, array: np.ndarray) -> None:
                files.write(folders[chunk.parameter.path] / chunk.name, array)

            for_each_chunk(values, self._read, write, self._progress)
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("orbax reads these arrays with its own handlers")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("orbax reads these arrays with its own handlers")


def check_complete(directory: epath.Path) -> None:
    """Refuses a tree on a local disk that lacks a chunk or holds one of another size.

    Orbax would notice too, but only once it has read half of the others, and less clearly.
    """
    for described in sorted(directory.glob("*/.zarray")) if is_local(directory) else []:
        entry = json.loads(described.read_text())
        sides = zip(entry["shape"], entry["chunks"], strict=True)
        places = itertools.product(*(range(-(-whole // size)) for whole, size in sides))
        dtype = np.dtype(entry["dtype"])
        expected_bytes = math.prod(entry["chunks"]) * dtype.itemsize
        found = {file.name: file.stat().st_size for file in os.scandir(described.parent)}
        for place in places:
            name = ".".join(map(str, place)) or "0"
            if found.get(name) != expected_bytes:
                raise UserError(
                    f"{described.parent / name} has {found.get(name, 'no')} bytes; expected "
                    f"{expected_bytes}: the checkpoint is damaged, convert it again"
                )


def save(directory: epath.Path, tree: dict[str, Any], read: Read, progress: Progress) -> None:
    """Writes a tree of `Parameter` leaves as an orbax checkpoint."""
    registry = ocp.type_handlers.create_type_handler_registry((Parameter, _Writer(read, progress)))
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to errors while orbax warns of what is meant: no OCDBT and no handler for jax.Array."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)

"""OUTPUT of `t1jax score`: a safetensors file filled row by row, complete or not there.

Memory holds one row: logits of a published model are a megabyte a token.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from t1jax.errors import UserError
from t1jax.model.config import ModelConfig

Shapes = dict[str, tuple[str, tuple[int, ...]]]
WIDTHS = {"F32": 4, "I16": 2}  # bytes of the dtypes that are written


def output_shapes(ids_shape: tuple[int, ...], config: ModelConfig, logits: bool) -> Shapes:
    """(dtype, shape) of OUTPUT's tensors, wider ones first so that each is aligned."""
    B, S = ids_shape
    shapes: Shapes = {"logprobs": ("F32", (B, max(S - 1, 0)))}
    if logits:
        shapes["logits"] = ("F32", (B, S, config.vocab))
    return shapes | {"routed_experts": ("I16", (B, S, config.layers, config.moe.chosen))}


class Writer:
    """Writes rows, in any order, into a safetensors file whose shapes are known beforehand."""

    def __init__(self, stream: BinaryIO, shapes: Shapes, metadata: Mapping[str, str]):
        self._stream = stream
        header: dict[str, Any] = {"__metadata__": metadata}
        self._rows: dict[str, tuple[int, int]] = {}  # where row 0 begins, and bytes per row
        end = 0
        for name, (dtype, shape) in shapes.items():
            row_bytes = math.prod(shape[1:]) * WIDTHS[dtype]
            first, end = end, end + row_bytes * shape[0]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (first, end)}
            self._rows[name] = (first, row_bytes)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        stream.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)
        stream.truncate(self._start + end)  # zeros, wherever nothing is written

    def write(self, name: str, row: int, values: np.ndarray) -> None:
        """Sets the beginning of a row; what is never set is zero."""
        first, row_bytes = self._rows[name]
        self._stream.seek(self._start + first + row * row_bytes)
        self._stream.write(np.ascontiguousarray(values).tobytes())


@contextlib.contextmanager
def written_aside(
    output: str, input: str, shapes: Shapes, metadata: Mapping[str, str]
) -> Iterator[Writer]:
    """A writer of OUTPUT.incomplete, which takes OUTPUT's place when the block succeeds."""
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{output} cannot be written: expected a file in an existing directory")
    if path.exists() and path.samefile(input):
        raise UserError(f"{output} is the input; choose another file for the output")
    needed_bytes = sum(math.prod(shape) * WIDTHS[dtype] for dtype, shape in shapes.values())
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{path.parent} has {free_bytes / 1e9:.1f} GB free and {output} may take "
            f"{needed_bytes / 1e9:.1f} GB"
        )
    work = path.with_name(f"{path.name}.incomplete")
    try:
        with work.open("wb") as stream:
            yield Writer(stream, shapes, metadata)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)

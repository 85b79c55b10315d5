"""Safetensors files: where each tensor lies, and its bytes without reading the others.

Knows nothing of the model. Reads headers itself, because the safetensors package neither maps
bfloat16 into numpy nor says what is wrong with a truncated file.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import ml_dtypes
import numpy as np
from etils import epath

from t1jax.errors import UserError
from t1jax.progress import Progress

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SetTwice(UserError):  # noqa: N818 - the refusals read as what is wrong
    """One parameter has two sources, and they may differ."""


class UnknownTensor(UserError):  # noqa: N818
    """The source holds a tensor that no parameter takes."""


class MissingTensor(UserError):  # noqa: N818
    """A parameter's tensor is not in the source."""


class MisshapenTensor(UserError):  # noqa: N818
    """A tensor's shape is not the one that config.json asks for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file; `array` maps it."""

    name: str
    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int

    def array(self) -> np.ndarray:
        """Its values, read-only; on a local disk only the pages that are touched get read.

        The pages stay counted as this process's memory until the array is let go.
        """
        path = epath.Path(self.file)
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        if is_local(path):
            mapped = np.memmap(os.fspath(path), np.uint8, "r", self.offset, self.nbytes)
            return np.asarray(mapped).view(self.dtype).reshape(self.shape)
        with path.open("rb") as stream:
            stream.seek(self.offset)
            flat = np.frombuffer(stream.read(self.nbytes), np.uint8)
        return flat.view(self.dtype).reshape(self.shape)


def is_local(path: epath.Path) -> bool:
    """Whether the path lies on a disk that can be mapped and renamed."""
    return "://" not in os.fspath(path)


def is_present(path: epath.Path) -> bool:
    """Whether anything has this name, a broken link included."""
    return os.path.lexists(os.fspath(path)) if is_local(path) else path.exists()


def require_file(path: epath.Path) -> None:
    """Refuses what is no regular file: a broken link, a directory, a pipe that nobody writes to."""
    if not is_local(path):
        return
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        if os.path.islink(name):
            raise UserError(
                f"{path} is a broken link to {os.readlink(name)}; download the file again"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{path} does not exist") from None
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise UserError(f"{path} is {kind}; expected a regular file")


class Recent:
    """The last few tensors that are in memory whole; each is made once for all threads."""

    def __init__(self, make: Callable[[str], np.ndarray], most: int = 4):
        self._make, self._most = make, most
        self._lock = threading.Lock()
        self._made: dict[str, concurrent.futures.Future[np.ndarray]] = {}

    def get(self, name: str) -> np.ndarray:
        """The tensor of this name; waits where another thread is making it."""
        with self._lock:
            known = self._made.get(name)
            future = self._made[name] = known or concurrent.futures.Future()
            if len(self._made) > self._most:
                del self._made[next(iter(self._made))]
        if known is None:
            try:
                future.set_result(self._make(name))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def read_directory(directory: epath.PathLike) -> dict[str, StoredTensor]:
    """All tensors of a Hugging Face directory by name, from the files' headers alone.

    Raises:
      UserError: no weights, a file that the index names is missing, a truncated or malformed file,
        an index that disagrees with the files, a tensor that two files hold.
    """
    directory = epath.Path(directory)
    if is_present(directory / INDEX):
        weight_map = _read_weight_map(directory / INDEX)
        files = sorted(set(weight_map.values()))
    elif is_present(directory / SINGLE):
        weight_map, files = None, [SINGLE]
    else:
        raise UserError(
            f"{directory} holds neither {INDEX} nor {SINGLE}; expected the directory of a "
            "Hugging Face checkpoint"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(directory / file).items():
            if name in tensors:
                raise SetTwice(
                    f"tensor {name} is in {tensors[name].file} and in {tensor.file}; one tensor "
                    "has one place: remove the stale file"
                )
            tensors[name] = tensor
    if weight_map is not None:
        _check_places(tensors, weight_map, directory / INDEX)
    return tensors


def _read_weight_map(index: epath.Path) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map; expected a safetensors index")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or epath.Path(file).name != file:
            raise UserError(
                f"{index} places {name} in {file!r}; expected the name of a file beside the index"
            )
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not is_present(index.parent / file)]
    if absent:
        raise UserError(
            f"{index.parent} lacks {named(absent)}, which {INDEX} names; download "
            f"{'it' if len(absent) == 1 else 'them'} again"
        )
    return weight_map


def _check_places(
    tensors: Mapping[str, StoredTensor], weight_map: Mapping[str, str], index: epath.Path
) -> None:
    """The index and the files hold the same tensors, each in the file that the index names."""
    advice = "the index and the files are of different downloads: download both again"
    lost = sorted(name for name in weight_map if name not in tensors)
    if lost:
        raise UserError(f"{index} lists {named(lost)}, which the files do not hold; {advice}")
    unlisted = [f"{name} of {t.file}" for name, t in tensors.items() if name not in weight_map]
    if unlisted:
        raise UserError(f"{index} does not list {named(unlisted)}; {advice}")
    for name, tensor in tensors.items():
        found = epath.Path(tensor.file).name
        if found != weight_map[name]:
            raise UserError(
                f"{index} places {name} in {weight_map[name]}, and it is in {found}; {advice}"
            )


# ---- headers ------------------------------------------------------------------------------------


def read_header(file: epath.PathLike) -> dict[str, StoredTensor]:
    """Where the tensors of one file lie.

    As in the safetensors library, tensors follow each other without a gap from the header to the
    file's end: two that overlap would convert, and one of them would be wrong.

    Raises:
      UserError: no regular file, a truncated one, a malformed header; naming file and tensor.
    """
    path = epath.Path(file)
    require_file(path)
    header, start, size = _read_header(path)
    _check_metadata(path, header.pop("__metadata__", {}))
    tensors = {name: _stored(path, start, name, entry) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise UserError(
                f"{path}: tensor {tensor.name} begins at byte {tensor.offset - start} of the data; "
                f"expected {end - start}, where the one before it ends: tensors overlap or leave "
                "a gap; download the file again"
            )
        end += tensor.nbytes
    if end != size:
        raise _truncated(path, size, f"its header needs {end}")
    return tensors


def _read_header(path: epath.Path) -> tuple[dict[str, Any], int, int]:
    """The header as JSON has it, where the data begins, and the size of the file."""
    size = path.stat().length
    if size == 0:
        raise UserError(f"{path} is empty; download it again")
    with path.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise _truncated(path, size, "a header's length alone takes 8")
        length = struct.unpack("<Q", start)[0]
        if not 0 < length <= size - 8:
            raise _truncated(path, size, f"its first 8 bytes announce a header of {length} bytes")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} has no readable safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise UserError(
            f"{path} has no readable safetensors header: it is a {type(header).__name__}; "
            "expected a JSON object"
        )
    return header, 8 + length, size


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice")
    return found


def _check_metadata(path: epath.Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(
            f"{path}: __metadata__ is {_shown(metadata)}; expected an object of strings, as "
            "safetensors writes; save the file again"
        )


def _truncated(path: epath.Path, size: int, why: str) -> UserError:
    return UserError(
        f"{path} is truncated or damaged: it has {size} bytes and {why}; download it again"
    )


def _stored(path: epath.Path, base: int, name: str, entry: Any) -> StoredTensor:
    def refuse(field: str, value: Any, expected: str) -> NoReturn:
        raise UserError(f"{path}: tensor {name} has {field} {_shown(value)}; expected {expected}")

    if not isinstance(entry, dict):
        refuse("header entry", entry, "an object with dtype, shape and data_offsets")
    for field in ("dtype", "shape", "data_offsets"):
        if field not in entry:
            raise UserError(f"{path}: tensor {name} has no {field} in the file's header")
    kind, sides, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        refuse("dtype", kind, f"one of {sorted(DTYPES)}")
    if not _are_counts(sides):
        refuse("shape", sides, "a list of integers that are not negative")
    if not _are_counts(ends) or len(ends) != 2:
        refuse("data_offsets", ends, "two integers that are not negative")
    dtype, shape, held = DTYPES[kind], tuple(sides), ends[1] - ends[0]
    if held != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path}: tensor {name} of shape {shape} and dtype {kind} holds {held} bytes; "
            f"expected {math.prod(shape) * dtype.itemsize}"
        )
    return StoredTensor(
        name=name,
        file=os.fspath(path),
        dtype=dtype,
        shape=shape,
        offset=base + ends[0],
        nbytes=held,
    )


def _are_counts(values: Any) -> bool:
    """A list of integers from 0 up; JSON's true and false are none."""
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- writing ------------------------------------------------------------------------------------


class Block(Protocol):
    """Something to be written as one tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def array(self) -> np.ndarray: ...


def nbytes(tensor: Block) -> int:
    """The size of its values."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def into_shards(tensors: Iterable[Block], max_bytes: int) -> dict[str, list[Block]]:
    """File names and what goes into each, filled in order."""
    shards: list[list[Block]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + nbytes(tensor) > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += nbytes(tensor)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def index_of(shards: Mapping[str, Collection[Block]]) -> str:
    """The index file of several shards."""
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    total_bytes = sum(nbytes(tensor) for shard in shards.values() for tensor in shard)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(document, indent=2) + "\n"


def write_file(path: epath.Path, tensors: Collection[Block], progress: Progress) -> None:
    """Writes one safetensors file, holding one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        first, end = end, end + nbytes(tensor)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (first, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.array()).reshape(-1).view(np.uint8)
            stream.write(values.data)
            progress.advance(values.nbytes)


def read_json(path: epath.Path) -> dict[str, Any]:
    """A JSON object from a file, or a UserError that says which file is not one."""
    require_file(path)
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds a {type(document).__name__}; expected a JSON object")
    return document


def named(names: list[str], most: int = 5) -> str:
    """Names for a message: the first few and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@functools.cache
def _words(itemsize: int) -> np.dtype:
    return np.dtype(f"u{itemsize}")


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: numpy copies those far faster than ml_dtypes."""
    return array.view(_words(array.dtype.itemsize))

"""`t1jax convert`: a Hugging Face directory becomes a t1jax checkpoint.

    DST/manifest.json        written last: what came from where, with hashes
    DST/params/              the parameter tree, in orbax's format
    DST/carried.safetensors  tensors that t1jax does not compute with (mtp.*, model.visual.*)
    DST/config.json, ...     the source's other files: tokenizer, chat template, generation_config

Streams: memory holds a few chunks of 16 MiB and what is mapped of the source, whatever the model's
size. The names and layouts are `huggingface.table`'s; nothing is written before they all fit.
"""

import concurrent.futures
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import tensorstore
from etils import epath

import t1jax
from t1jax.checkpoint import chunked
from t1jax.checkpoint.chunked import Chunk, Parameter
from t1jax.checkpoint.huggingface import Source, is_carried, open_source, table
from t1jax.checkpoint.staging import refuse_overlap, staged
from t1jax.checkpoint.tensor_files import (
    DTYPE_NAMES,
    StoredTensor,
    bits,
    is_local,
    read_header,
    require_file,
    write_file,
)
from t1jax.checkpoint.trees import Path, flatten, put
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params, declarations
from t1jax.model.sharding import MESH_AXES
from t1jax.progress import Progress

MANIFEST = "manifest.json"
PARAMS = "params"
CARRIED_FILE = "carried.safetensors"
FORMAT = 1
TRAVELS = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # files beside the weights
STAYS = (".index.json", MANIFEST)


def convert(
    src: epath.PathLike,
    dst: epath.PathLike,
    *,
    mesh: str = "",
    verify: bool = False,
    dtype: str = "",
    progress: Progress | None = None,
) -> None:
    """Makes the t1jax checkpoint `dst` from the Hugging Face directory `src`, local or gs://.

    Args:
      src: config.json and safetensors, in either expert layout; bfloat16, float32 or block FP8.
      dst: must not exist.
      mesh: the mesh that will load it, as "fsdp=16,expert=8": each chunk then is one device's, and
        no host reads more than its part. It need not exist here. Any other mesh loads it too.
      verify: read everything back and compare every byte with the source.
      dtype: cast to; empty keeps each tensor's. A_log and linear_attn.norm then become float32.
      progress: None shows it on stderr.

    Raises:
      UserError: the source is incomplete, damaged, converted already or of another model, or `dst`
        exists or is inside it. Nothing is left behind then.
    """
    if progress is None:
        with Progress() as progress:
            return convert(src, dst, mesh=mesh, verify=verify, dtype=dtype, progress=progress)
    _refuse_converted(epath.Path(src))
    refuse_overlap(dst, src)
    source = open_source(src)
    parameters = describe(source, mesh, dtype)
    carried = {name: t for name, t in source.tensors.items() if is_carried(name)}
    total_bytes = sum(p.nbytes for p in parameters) + sum(t.nbytes for t in carried.values())
    others = files_beside(epath.Path(source.directory))
    files = [*dict.fromkeys(t.file for t in source.tensors.values()), *others]
    with staged(dst, total_bytes) as work, _hashing(files) as hashes:
        progress.start("convert", total_bytes)
        chunked.save(work / PARAMS, _tree(parameters), source.published, progress)
        if carried:
            write_file(work / CARRIED_FILE, carried.values(), progress)
        for file in others:
            epath.Path(file).copy(work / epath.Path(file).name)
        if verify:
            progress.start("verify", total_bytes)
            _verify(work, parameters, carried, source, progress)
        manifest = make_manifest(source, parameters, dtype, hashes)
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _refuse_converted(src: epath.Path) -> None:
    if (src / MANIFEST).exists() and (src / PARAMS).exists():
        raise UserError(
            f"{src} is a t1jax checkpoint already; expected a Hugging Face directory, which "
            "t1jax export makes of it"
        )


def describe(source: Source, mesh: str, dtype: str) -> list[Parameter]:
    """What will be written for each parameter; refuses a mesh that does not divide one."""
    model = Qwen3_5(source.config)
    rows = table(source.config, source.naming)
    declared = declarations(model)
    described = []
    devices = _abstract_mesh(mesh)
    abstract = abstract_params(model, devices, dtype or "float32")  # type: ignore[arg-type]
    for path, leaf in flatten(abstract).items():
        stored = source.dtype(path, rows[path])
        described.append(
            Parameter(
                path=path,
                parts=rows[path],
                shape=leaf.shape,
                axes=declared[path].axes,
                source_dtype=stored,
                dtype=leaf.dtype if dtype else stored,
                shard=leaf.sharding.shard_shape(leaf.shape),
            )
        )
    return described


def _abstract_mesh(shape: str) -> jax.sharding.AbstractMesh:
    """The mesh that `make_mesh` would build, without its devices."""
    sizes = dict.fromkeys(MESH_AXES, 1)
    for part in filter(None, shape.split(",")):
        axis, _, size = part.partition("=")
        if axis.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise UserError(
                f"mesh {shape!r}: {part!r} is not AXIS=SIZE with an axis of {MESH_AXES} and a "
                "positive size; write for example fsdp=16,expert=8"
            )
        sizes[axis.strip()] = int(size)
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds)


def _tree(parameters: list[Parameter]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for parameter in parameters:
        put(tree, parameter.path, parameter)
    return tree


def files_beside(directory: epath.Path) -> list[str]:
    """Tokenizer, chat template and configs: what travels along as it is."""
    files = [
        path
        for path in directory.iterdir()
        if path.name.endswith(TRAVELS) and not path.name.endswith(STAYS) and not path.is_dir()
    ]
    for path in files:
        require_file(path)
    return sorted(map(str, files))


@contextmanager
def _hashing(files: list[str]) -> Iterator[dict[str, concurrent.futures.Future[str]]]:
    """SHA-256 of each file, worked out beside the conversion, in the same order."""
    hasher = concurrent.futures.ThreadPoolExecutor(1)
    try:
        yield {file: hasher.submit(_hash, file) for file in files}
    finally:
        hasher.shutdown(cancel_futures=True)


def _hash(file: str) -> str:
    with epath.Path(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_manifest(
    source: Source,
    parameters: list[Parameter],
    dtype: str,
    hashes: Mapping[str, concurrent.futures.Future[str]],
) -> dict[str, Any]:
    files = {
        epath.Path(file).name: {"bytes": epath.Path(file).stat().length, "sha256": done.result()}
        for file, done in hashes.items()
    }
    tensors = {
        name: {"dtype": DTYPE_NAMES[t.dtype], "file": epath.Path(t.file).name}
        for name, t in source.tensors.items()
    }
    return {
        "format": FORMAT,
        "t1jax": t1jax.__version__,
        "cast_to": dtype,
        "counts": {
            "tensors": len(tensors),
            "carried_tensors": sum(map(is_carried, tensors)),
            "parameters": len(parameters),
            "numbers": sum(math.prod(p.shape) for p in parameters),
        },
        "source": {
            "directory": source.directory,
            "prefix": source.naming.prefix,
            "experts": source.naming.experts,
            "files": files,
            "tensors": tensors,
        },
        "parameters": {
            ".".join(p.path): {"dtype": p.dtype.name, "shape": p.shape} for p in parameters
        },
        "config": source.document,
    }


# ---- verification -------------------------------------------------------------------------------


def open_array(
    params: epath.Path, path: Path, context: tensorstore.Context | None = None
) -> tensorstore.TensorStore:
    """One parameter of a checkpoint, for reading any part of it."""
    folder = params / ".".join(path)
    url = f"file://{folder.resolve()}/" if is_local(folder) else f"{folder}/"
    spec = {"driver": "zarr", "kvstore": url}
    return tensorstore.open(spec, read=True, context=context).result()


def _verify(
    work: epath.Path,
    parameters: list[Parameter],
    carried: Mapping[str, StoredTensor],
    source: Source,
    progress: Progress,
) -> None:
    """Reads what was written, not through the code that wrote it, and compares every byte."""
    arrays = {p.path: open_array(work / PARAMS, p.path) for p in parameters}

    def compare(chunk: Chunk, wanted: np.ndarray) -> None:
        sides = zip(chunk.starts, wanted.shape, strict=True)
        block = tuple(slice(first, first + size) for first, size in sides)
        found = arrays[chunk.parameter.path][block].read().result()
        if found.dtype != wanted.dtype or not np.array_equal(bits(found), bits(wanted)):
            raise _differs(".".join(chunk.parameter.path), source)

    chunked.for_each_chunk(parameters, source.published, compare, progress)
    if carried:
        written = read_header(work / CARRIED_FILE)
        for name, tensor in carried.items():
            if not np.array_equal(bits(written[name].array()), bits(tensor.array())):
                raise _differs(name, source)
            progress.advance(tensor.nbytes)


def _differs(name: str, source: Source) -> UserError:
    return UserError(
        f"{name} was written and reads back differently from {source.directory}; the disk or the "
        "memory is at fault: convert again, to another disk"
    )

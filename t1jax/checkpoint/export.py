"""`t1jax export`: a t1jax checkpoint becomes a Hugging Face directory again.

The tensors have the names, expert layout and dtypes of the source they were converted from, and
unless cast or changed their bytes too. Vision and MTP tensors come along untouched: servers that
load the whole published architecture need them, and MTP gone stale only costs accepted drafts.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from t1jax.checkpoint.convert import CARRIED_FILE, MANIFEST, PARAMS, files_beside, open_array
from t1jax.checkpoint.fp8 import SCALE
from t1jax.checkpoint.huggingface import Naming, by_tensor, is_carried, table
from t1jax.checkpoint.parts import Index, Use, assemble
from t1jax.checkpoint.restore import read_manifest
from t1jax.checkpoint.staging import refuse_overlap, staged
from t1jax.checkpoint.tensor_files import (
    INDEX,
    Block,
    index_of,
    into_shards,
    nbytes,
    read_header,
    write_file,
)
from t1jax.checkpoint.trees import Path
from t1jax.errors import UserError
from t1jax.model.config import from_huggingface
from t1jax.progress import Progress

SHARD_BYTES = 5 * 10**9  # of one file, unless another size is asked for
Arrays = Mapping[Path, tensorstore.TensorStore]


def export(
    src: epath.PathLike,
    dst: epath.PathLike,
    *,
    text_only: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face directory `dst` from the t1jax checkpoint `src`.

    Args:
      src: what `t1jax convert` made.
      dst: must not exist.
      text_only: leave out vision and MTP and write the flat text config (Qwen3_5MoeForCausalLM).
      max_shard_bytes: of one file; None: 5 GB, or more if one tensor takes more.
      progress: None shows it on stderr.

    Raises:
      UserError: `src` is no complete checkpoint, `dst` exists or is inside it, or a tensor is
        larger than `max_shard_bytes`.
    """
    if progress is None:
        with Progress() as progress:
            return export(
                src, dst, text_only=text_only, max_shard_bytes=max_shard_bytes, progress=progress
            )
    src = epath.Path(src)
    manifest = read_manifest(src)
    refuse_overlap(dst, src)
    tensors = _tensors(src, manifest, text_only)
    total_bytes = sum(map(nbytes, tensors))
    shards = into_shards(tensors, _largest_file(tensors, max_shard_bytes))
    with staged(dst, total_bytes) as work:
        progress.start("export", total_bytes)
        for name, shard in shards.items():
            write_file(work / name, shard, progress)
        for file in files_beside(src):
            epath.Path(file).copy(work / epath.Path(file).name)
        config = _config(manifest, text_only)
        if config != manifest["config"]:
            (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(shards) > 1:
            (work / INDEX).write_text(index_of(shards))


def _largest_file(tensors: list[Block], asked_bytes: int | None) -> int:
    """How many bytes of tensors a file may hold: what was asked for, if every tensor fits."""
    largest = max(tensors, key=nbytes)
    if asked_bytes is None:
        return max(SHARD_BYTES, nbytes(largest))
    if asked_bytes < nbytes(largest):
        raise UserError(
            f"--max-shard-size of {asked_bytes} bytes is less than tensor {largest.name} takes, "
            f"{nbytes(largest)} bytes, and a tensor is in one file; give at least that"
        )
    return asked_bytes


@dataclasses.dataclass(frozen=True)
class _Assembled:
    """A published tensor that is put together when it is written."""

    name: str
    uses: list[Use]
    arrays: Arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return self.uses[0][1].shape

    @property
    def dtype(self) -> np.dtype:
        return self.arrays[self.uses[0][0]].dtype.numpy_dtype

    def array(self) -> np.ndarray:
        return assemble(self.uses, self._read)

    def _read(self, path: Path, index: Index) -> np.ndarray:
        return self.arrays[path][index].read().result()


def _tensors(src: epath.Path, manifest: Mapping[str, Any], text_only: bool) -> list[Block]:
    """Every tensor to write, in the source's order; scales of FP8 weights have no successor."""
    source = manifest["source"]
    config = from_huggingface(manifest["config"], str(src / MANIFEST))
    rows = table(config, Naming(source["prefix"], source["experts"]))
    # Two experts share a chunk, and gate and up do: the pool keeps it between their reads.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2**28}})
    arrays = {path: open_array(src / PARAMS, path, context) for path in rows}
    takers = by_tensor(rows)
    carried = read_header(src / CARRIED_FILE) if (src / CARRIED_FILE).exists() else {}
    tensors: list[Block] = []
    for name in source["tensors"]:
        if is_carried(name):
            if text_only:
                continue
            if name not in carried:
                raise UserError(f"{src / CARRIED_FILE} lacks {name}; convert the checkpoint again")
            tensors.append(carried[name])
        elif not name.endswith(SCALE):
            tensors.append(_Assembled(name, takers[name], arrays))
    return tensors


def _config(manifest: Mapping[str, Any], text_only: bool) -> dict[str, Any]:
    """The source's config.json, changed only where the weights differ from the source's."""
    config = dict(manifest["config"])
    text = dict(config.get("text_config", config))
    for document in (config, text):
        document.pop("quantization_config", None)
        if manifest["cast_to"] and "dtype" in document:
            document["dtype"] = manifest["cast_to"]
    if text_only:
        return text | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
        }
    return config | {"text_config": text} if "text_config" in config else config

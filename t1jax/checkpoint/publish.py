"""Weights that leave training: to the sampler, in memory, and to a directory that anything reads.

`make_publisher` casts and reshards in one program. `write_weights` makes the same kind of directory
as `t1jax convert`, so that score, sample, export and the next stage read it like any checkpoint.
Knows nothing of optimizers, nor of when weights are published.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from t1jax.checkpoint.convert import (
    CARRIED_FILE,
    MANIFEST,
    PARAMS,
    describe,
    files_beside,
    make_manifest,
)
from t1jax.checkpoint.huggingface import is_carried, open_source
from t1jax.checkpoint.restore import is_converted, read_manifest
from t1jax.checkpoint.staging import staged
from t1jax.checkpoint.tensor_files import is_local, write_file
from t1jax.checkpoint.trees import flatten
from t1jax.model.qwen3_5 import Params, Qwen3_5, abstract_params
from t1jax.progress import Progress


def make_publisher(
    model: Qwen3_5, mesh: jax.sharding.Mesh, dtype: str
) -> Callable[[Params], Params]:
    """A function from trained parameters to the sampler's: new arrays, cast, on its mesh.

    New ones even where nothing changes: training donates its own.
    """
    abstract = abstract_params(model, mesh, dtype)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    @jax.jit
    def cast(params: Params) -> Params:
        return jax.tree.map(lambda x, leaf: jnp.copy(x).astype(leaf.dtype), params, abstract)

    return lambda params: jax.device_put(cast(params), shardings)


def write_weights(
    params: Params,
    source: str,
    dst: epath.PathLike,
    dtype: str,
    *,
    trained: Mapping[str, str | int],
) -> None:
    """Writes parameters as a checkpoint directory, which appears whole; an older one is replaced.

    Every process makes the call and writes its own shards.

    Args:
      params: of the policy.
      source: the checkpoint that training began from: its tokenizer, its template and what t1jax
        does not compute with travel along.
      dst: the directory.
      dtype: of the parameters.
      trained: stage and steps, for the manifest.
    """
    origin, dst = epath.Path(source), epath.Path(dst)
    total_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    old = dst.parent / f"{dst.name}.replaced"
    new = dst.parent / f"{dst.name}.new"
    with staged(new, total_bytes) if _leads() else _led(new) as work:
        _meet("the directory is there")
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(work / PARAMS, args=ocp.args.PyTreeSave(params))
        if _leads():
            _write_facts(work, origin, params, dtype, trained)
    if _leads():
        if dst.exists():
            old.rmtree(missing_ok=True)
            dst.rename(old)
        new.rename(dst)
        old.rmtree(missing_ok=True)
    _meet("the weights are there")


def _leads() -> bool:
    return jax.process_index() == 0


@contextmanager
def _led(dst: epath.Path) -> Iterator[epath.Path]:
    """Where another process stages `dst`."""
    yield dst.parent / f"{dst.name}.incomplete" if is_local(dst) else dst


def _meet(where: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"write_weights: {where}")


def _write_facts(
    work: epath.Path,
    origin: epath.Path,
    params: Params,
    dtype: str,
    trained: Mapping[str, str | int],
) -> None:
    """All but the parameters."""
    for file in files_beside(origin):
        epath.Path(file).copy(work / epath.Path(file).name)
    manifest = _manifest(origin, work, dtype)
    manifest["parameters"] = {
        ".".join(path): {"dtype": leaf.dtype.name, "shape": leaf.shape}
        for path, leaf in flatten(params).items()
    }
    manifest["trained"] = dict(trained)
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _manifest(origin: epath.Path, work: epath.Path, dtype: str) -> dict[str, Any]:
    """The manifest of what training began from, and a copy of what that carries along."""
    if is_converted(origin):
        if (origin / CARRIED_FILE).exists():
            (origin / CARRIED_FILE).copy(work / CARRIED_FILE)
        return read_manifest(origin) | {"cast_to": dtype, "trained_from": str(origin)}
    source = open_source(origin)
    carried = [tensor for name, tensor in source.tensors.items() if is_carried(name)]
    if carried:
        with Progress() as progress:
            progress.start("carried tensors", sum(tensor.nbytes for tensor in carried))
            write_file(work / CARRIED_FILE, carried, progress)
    manifest = make_manifest(source, describe(source, "", dtype), dtype, {})
    return manifest | {"trained_from": str(origin)}

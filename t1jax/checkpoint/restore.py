"""Opening a checkpoint for use: a converted one or a Hugging Face directory, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from t1jax.checkpoint.chunked import check_complete
from t1jax.checkpoint.convert import FORMAT, MANIFEST, PARAMS
from t1jax.checkpoint.huggingface import LAYOUTS, PREFIXES, head_name, load_params
from t1jax.checkpoint.staging import MARK
from t1jax.checkpoint.tensor_files import INDEX, SINGLE, is_present, read_json
from t1jax.checkpoint.trees import flatten, put
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig, from_huggingface
from t1jax.model.qwen3_5 import Params, Qwen3_5, abstract_params


def open_checkpoint(
    path: epath.PathLike,
    model: Qwen3_5 | None = None,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str | None = None,
) -> tuple[ModelConfig, Params]:
    """Sizes and parameters of a checkpoint; every shard is read where it will live.

    Args:
      path: what `t1jax convert` made, or a Hugging Face directory; local or gs://.
      model: what the parameters are for; None: the language model. A value head has no stored
        parameters and starts from its initializer, zeros.
      mesh: where the parameters will live; None: the first device.
      dtype: None keeps the stored dtypes; otherwise all but the float32 ones become it.

    Raises:
      UserError: the path is no checkpoint, an incomplete one, or not this model's.
      ValueError: the mesh does not divide a parameter.
    """
    path = epath.Path(path)
    converted = is_converted(path)
    document = read_manifest(path)["config"] if converted else read_json(path / "config.json")
    config = from_huggingface(document, str(path / (MANIFEST if converted else "config.json")))
    model = Qwen3_5(config) if model is None else model
    if model.config != config:
        raise UserError(
            f"{path} holds {config}; expected {model.config}: build the model from its config.json"
        )
    if converted:
        return config, _restore(path / PARAMS, model, mesh, dtype)
    return config, load_params(path, model, mesh=mesh, dtype=dtype)


def read_manifest(path: epath.Path) -> dict[str, Any]:
    """The manifest of a converted checkpoint; refuses what is none or not complete."""
    if not is_converted(path):
        raise UserError(f"{path} is a Hugging Face directory; expected one that t1jax made")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path / MANIFEST} has format {manifest.get('format')!r}; this t1jax reads "
            f"{FORMAT}: convert the checkpoint again"
        )
    _check_manifest(manifest, path / MANIFEST)
    return manifest


def _check_manifest(manifest: dict[str, Any], where: epath.Path) -> None:
    source = manifest.get("source")
    source = source if isinstance(source, dict) else {}
    read = {
        "config": isinstance(manifest.get("config"), dict),
        "cast_to": isinstance(manifest.get("cast_to"), str),
        "source.prefix": source.get("prefix") in PREFIXES,
        "source.experts": source.get("experts") in LAYOUTS,
        "source.tensors": isinstance(source.get("tensors"), dict),
    }
    wrong = [name for name, right in read.items() if not right]
    if wrong:
        raise UserError(
            f"{where} is damaged: {', '.join(wrong)} missing or malformed; convert the checkpoint "
            "again"
        )


def is_converted(path: epath.Path) -> bool:
    """Tells converted from Hugging Face; refuses everything else."""
    if not path.exists():
        aside = path.parent / f"{path.name}.incomplete"
        hint = f"; {aside} is what an ended conversion left" if aside.exists() else ""
        raise UserError(f"{path} does not exist{hint}")
    unfinished = (path / MARK).exists() or path.name.endswith(".incomplete")
    if not unfinished and (path / MANIFEST).exists():
        return True
    if unfinished or (path / PARAMS).exists():
        raise UserError(f"{path} is incomplete: it has no {MANIFEST}; run t1jax convert again")
    if not any(is_present(path / name) for name in (INDEX, SINGLE)):
        raise UserError(
            f"{path} is no checkpoint: expected {MANIFEST} (made by t1jax convert), or {INDEX} or "
            f"{SINGLE} (from Hugging Face)"
        )
    return False


def _restore(
    params: epath.Path, model: Qwen3_5, mesh: jax.sharding.Mesh | None, dtype: str | None
) -> Params:
    """Reads the tree through orbax; a value head is made here."""
    check_complete(params)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = flatten(checkpointer.metadata(params).item_metadata.tree)
        wanted: Params = {}
        fresh: Params = {}
        for path, leaf in flatten(abstract_params(model, mesh, dtype or "float32")).items():
            starts_fresh = path[0] == "head" and head_name(model) == "value"
            kept = leaf.dtype if dtype or starts_fresh else stored[path].dtype
            leaf = jax.ShapeDtypeStruct(leaf.shape, kept, sharding=leaf.sharding or here)
            put(fresh if starts_fresh else wanted, path, leaf)
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=bool(fresh),
        )
        tree = checkpointer.restore(params, args=arguments)
    zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)  # noqa: E731
    return tree | jax.tree.map(zeros, fresh)

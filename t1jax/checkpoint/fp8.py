"""Block-scaled FP8 releases: one float scale for each 128x128 block of a weight's last two axes."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from t1jax.checkpoint.tensor_files import (
    MisshapenTensor,
    MissingTensor,
    StoredTensor,
    UnknownTensor,
)
from t1jax.errors import UserError

SCALE = "_scale_inv"  # ends the name of a weight's scales, which lie beside it
SCALE_BLOCK = 128
QUANTISED = np.dtype(ml_dtypes.float8_e4m3fn)
PLAIN = tuple(map(np.dtype, ("bfloat16", "float16", "float32")))


def check_dtypes(
    tensors: Mapping[str, StoredTensor], document: Mapping[str, Any], where: str
) -> None:
    """Every weight is a plain float, or FP8 with block scales beside it of the right shape.

    Args:
      tensors: the model's, without those that are only carried.
      document: config.json.
      where: the source, for messages.

    Raises:
      MissingTensor, MisshapenTensor, UnknownTensor: the scales do not fit the weights.
      UserError: another dtype or another block size.
    """
    for name, tensor in tensors.items():
        scale = tensors.get(name + SCALE)
        if tensor.dtype == QUANTISED:
            _check_scale(tensor, scale, where)
        elif tensor.dtype not in PLAIN:
            raise UserError(
                f"{where}: {name} is {tensor.dtype}; expected bfloat16, float32, float16, or "
                f"{QUANTISED} with {SCALE_BLOCK}x{SCALE_BLOCK} block scales"
            )
        elif scale is not None:
            raise UnknownTensor(f"{where}: {name} is {tensor.dtype} and has {scale.name} too")
    if any(tensor.dtype == QUANTISED for tensor in tensors.values()):
        _check_block(document, where)


def _check_scale(tensor: StoredTensor, scale: StoredTensor | None, where: str) -> None:
    if scale is None:
        raise MissingTensor(
            f"{where}: {tensor.name} is {tensor.dtype} and its scales {tensor.name}{SCALE} are "
            "missing; download the checkpoint again"
        )
    expected = (*tensor.shape[:-2], *(-(-side // SCALE_BLOCK) for side in tensor.shape[-2:]))
    if scale.shape != expected:
        raise MisshapenTensor(
            f"{where}: {scale.name} is {scale.shape}, expected {expected}: one scale per "
            f"{SCALE_BLOCK}x{SCALE_BLOCK} block of {tensor.name}"
        )


def _check_block(document: Mapping[str, Any], where: str) -> None:
    expected = [SCALE_BLOCK, SCALE_BLOCK]
    for config in (document, document.get("text_config", {})):
        quantisation = config.get("quantization_config") or {}
        if not isinstance(quantisation, Mapping):
            raise UserError(
                f"{where}/config.json has quantization_config={quantisation!r}; expected an object"
            )
        block = quantisation.get("weight_block_size", expected)
        if block != expected:
            raise UserError(
                f"{where}/config.json has quantization_config.weight_block_size={block}; only "
                f"{expected} is read"
            )


def dequantise(quantised: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Values times the scale of their 128x128 block, as bfloat16; blocks at the edge are cut."""
    rows, columns = quantised.shape[-2:]
    out = np.empty(quantised.shape, "bfloat16")
    for top in range(0, rows, SCALE_BLOCK):
        band = slice(top, min(top + SCALE_BLOCK, rows))
        factors = scale[..., top // SCALE_BLOCK, None, :].astype(np.float32)
        factors = np.repeat(factors, SCALE_BLOCK, axis=-1)[..., :columns]
        out[..., band, :] = quantised[..., band, :].astype(np.float32) * factors
    return out

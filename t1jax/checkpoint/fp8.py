"""Block-scaled FP8 releases: one float scale for each 128x128 block of a weight's last two axes."""

from collections.abc import Mapping

import numpy as np

from t1jax.checkpoint.tensor_files import (
    MisshapenTensor,
    MissingTensor,
    StoredTensor,
    UnknownTensor,
)

SCALE = "_scale_inv"  # ends the name of a weight's scales, which lie beside it
SCALE_BLOCK = 128


def check_scales(tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Every one-byte tensor has its block scales beside it, and only those have any."""
    for name, tensor in tensors.items():
        scale = tensors.get(name + SCALE)
        if tensor.dtype.itemsize > 1:
            if scale is not None:
                raise UnknownTensor(f"{where}: {name} is {tensor.dtype} and has {scale.name} too")
            continue
        if scale is None:
            raise MissingTensor(
                f"{where}: {name} is {tensor.dtype} and its scales {name + SCALE} are missing"
            )
        expected = (*tensor.shape[:-2], *(-(-side // SCALE_BLOCK) for side in tensor.shape[-2:]))
        if scale.shape != expected:
            raise MisshapenTensor(
                f"{where}: {scale.name} is {scale.shape}, expected {expected}: one scale per "
                f"{SCALE_BLOCK}x{SCALE_BLOCK} block of {name}"
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

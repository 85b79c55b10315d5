"""INPUT of `t1jax score`: opened, and refused where the model cannot have seen such tokens.

What stands beyond a row's length is never read. Routes stay in the file until their row's turn.
"""

import dataclasses
import re
import sys
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from t1jax.errors import UserError
from t1jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Tokens:
    """INPUT, checked. Routes stay in the file and are read row by row."""

    ids: np.ndarray  # [B, S], any integer dtype
    lengths: np.ndarray  # [B] int64
    routes: Any  # a safetensors slice [B, S, L, K], or None

    def routes_of(self, row: int) -> np.ndarray:
        """[length, L, K], as recorded."""
        return self.routes[row : row + 1, : int(self.lengths[row])][0]


def read_input(path: str, config: ModelConfig, *, replay: bool, on_missing: str) -> Tokens:
    """Opens INPUT and refuses what the model cannot have seen, naming the first place."""
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"{path} is no readable safetensors file: {error}") from None
    wanted = ["input_ids", "lengths"] + ["routed_experts"] * replay
    missing = sorted(set(wanted) - set(file.keys()))
    if missing:
        raise UserError(
            f"{path} has no {', '.join(missing)}; it holds {sorted(file.keys())} and "
            f"{'replay' if replay else 'score'} needs {wanted}"
        )
    slices = {name: file.get_slice(name) for name in wanted}
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    for name, part in slices.items():
        if not re.fullmatch(r"[IU]\d+", part.get_dtype()):
            raise UserError(f"{path}: {name} has dtype {part.get_dtype()}; expected integers")
    _check_shapes(path, shapes, config)
    ids, lengths = file.get_tensor("input_ids"), file.get_tensor("lengths")
    _check_lengths(path, lengths, ids.shape[1])
    tokens = Tokens(ids, lengths.astype(np.int64), slices.get("routed_experts"))
    _check_ids(path, tokens, config.vocab)
    if replay:
        for row in range(len(ids)):
            _check_routes(path, tokens, row, config.moe.experts, on_missing)
    elif "routed_experts" in file.keys():  # noqa: SIM118 - safe_open is no mapping
        print(f"{path}: routed_experts are not used without --replay", file=sys.stderr)
    return tokens


def _check_shapes(path: str, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    if len(shapes["input_ids"]) != 2:
        raise UserError(f"{path}: input_ids has shape {shapes['input_ids']}; expected [B, S]")
    B, S = shapes["input_ids"]
    expected = {"lengths": (B,), "routed_experts": (B, S, config.layers, config.moe.chosen)}
    for name, shape in expected.items():
        if shapes.get(name, shape) == shape:
            continue
        hint = ""
        if name == "routed_experts" and shapes[name] == (*shape[:2], shape[3], shape[2]):
            hint = ": the last two axes are swapped, they are [layer, choice]"
        if name == "routed_experts" and shapes[name] == (B, S - 1, *shape[2:]):
            hint = ": add a row of -1 for each last token"
        raise UserError(f"{path}: {name} has shape {shapes[name]}; expected {shape}{hint}")


def _check_lengths(path: str, lengths: np.ndarray, S: int) -> None:
    bad = np.flatnonzero((lengths < 0) | (lengths > S))
    if bad.size:
        raise UserError(
            f"{path}: row {bad[0]} has length {lengths[bad[0]]}; input_ids has room for 0..{S}"
        )
    if not lengths.any():
        raise UserError(f"{path} has {len(lengths)} rows and no token in them; nothing to score")


def _check_ids(path: str, tokens: Tokens, vocab: int) -> None:
    real = np.arange(tokens.ids.shape[1]) < tokens.lengths[:, None]
    bad = np.argwhere(real & ((tokens.ids < 0) | (tokens.ids >= vocab)))
    if bad.size:
        row, position = bad[0]
        raise UserError(
            f"{path}: row {row}, position {position} is token {tokens.ids[row, position]}; the "
            f"vocabulary has 0..{vocab - 1} ({len(bad)} such tokens in all)"
        )


def _check_routes(path: str, tokens: Tokens, row: int, experts: int, on_missing: str) -> None:
    """Refuses one row's routes that no router chose."""
    ids_TLC = tokens.routes_of(row)
    absent_TLC = ids_TLC == -1
    ordered = np.sort(ids_TLC, axis=-1)
    missing = absent_TLC.all(axis=-1)
    refused = {
        "holds -1 beside experts: a row is recorded or missing as a whole": (
            absent_TLC.any(axis=-1) & ~missing
        ),
        f"names an expert outside 0..{experts - 1}": (
            ((ids_TLC < 0) | (ids_TLC >= experts)).any(axis=-1) & ~missing
        ),
        "names an expert twice": (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & ~missing,
    }
    if on_missing == "error":
        # The last token is never an input of a step that recorded it, and carries no loss.
        inputs = np.arange(len(missing))[:, None] < len(missing) - 1
        refused["is missing; --on-missing live lets the router choose there"] = missing & inputs
    for what, places in refused.items():
        if places.any():
            token, layer = np.argwhere(places)[0]
            raise UserError(
                f"{path}: routed_experts row {row}, token {token}, layer {layer} "
                f"{ids_TLC[token, layer].tolist()} {what} ({places.sum()} such in this row)"
            )

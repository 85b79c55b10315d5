"""The reference's numbers (tests/fixtures) in one layout, and our model with the same weights."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from t1jax.checkpoint.huggingface import Naming, load_params, to_published
from t1jax.model.config import from_huggingface
from t1jax.model.execution import Execution, default_execution
from t1jax.model.moe import Plan, Replay, plan_layout
from t1jax.model.qwen3_5 import Qwen3_5, bind
from t1jax.model.sharding import make_mesh
from t1jax.trajectory.routes import plan_dispatch

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("ref-a", "ref-b", "tiny-square")


@dataclasses.dataclass(frozen=True)
class Golden:
    """What the reference computed; padded positions mean nothing, see `mask`."""

    tokens: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]
    logits: np.ndarray  # [B, T, V]
    logprobs: np.ndarray  # [B, T-1]
    layers: np.ndarray  # [L, B, T, D] output of each layer (tiny-square: L-1 of them)
    final: np.ndarray  # [B, T, D] after the final norm
    routes: np.ndarray  # [L, B, T, C]
    forced: np.ndarray  # [L, B, T, C]
    forced_logits: np.ndarray
    forced_logprobs: np.ndarray
    gradients: dict[str, np.ndarray]  # of the summed log-probs, published names
    forced_gradients: dict[str, np.ndarray]


@functools.cache
def golden(name: str) -> Golden:
    folder = FIXTURES / name
    if name == "tiny-square":
        g = load_file(folder / "golden.safetensors")
        hidden = np.moveaxis(g["hidden_states"], 1, 0)
        # The reference's top-k, taken here from its own router logits as a check of the ids.
        return Golden(
            g["input_ids"], g["attention_mask"], g["logits"], g["logprobs"], hidden[1:-1],
            hidden[-1], np.moveaxis(g["routed_experts"], 2, 0),
            np.moveaxis(g["forced_experts"], 2, 0), g["forced_logits"], g["forced_logprobs"], {},
            load_file(folder / "golden_forced_grads.safetensors"),
        )
    f, r, d = (np.load(folder / f"{n}.npz") for n in ("forward", "replay", "grads"))
    return Golden(
        f["input_ids"], f["attention_mask"], f["logits"], f["token_logprobs"],
        f["hidden_states"][1:], f["final_norm"], f["router_indices"], r["forced_indices"],
        r["logits"], r["token_logprobs"], _gradients(d), _gradients(r),
    )


def _gradients(archive: Any) -> dict[str, np.ndarray]:
    return {k.removeprefix("grad:"): archive[k] for k in archive.files if k.startswith("grad:")}


@functools.cache
def model(name: str) -> tuple[Qwen3_5, dict]:
    """Our abstract model and the fixture's weights in float32 (bf16 weights upcast)."""
    document = json.loads((FIXTURES / name / "config.json").read_text())
    module = Qwen3_5(from_huggingface(document))
    params = load_params(FIXTURES / name, module)
    return module, jax.tree.map(lambda x: x.astype(jnp.float32), params)


def execution(mesh: str = "", **changes: Any) -> Execution:
    return default_execution(make_mesh(mesh), **{"dtype": "float32", **changes})


@functools.cache
def evaluator(name: str, run: Execution):
    """Jitted (params, tokens, mask, replay) -> logits, log-probs, and the Output."""
    module, _ = model(name)

    @jax.jit
    def evaluate(params, tokens, mask, replay):
        bound = bind(module, params)
        out = bound(tokens, segments_BT=mask, run=run, replay=replay, with_layers=True)
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        logprobs = bound.head.logprobs(out.hidden_BTD, targets, run)
        return bound.head(out.hidden_BTD, run), logprobs[:, :-1], out

    return evaluate


@functools.cache
def differentiator(name: str, run: Execution):
    """Jitted (params, tokens, mask, replay) -> (sum of log-probs, gradients)."""
    module, _ = model(name)

    def objective(params, tokens, mask, replay):
        bound = bind(module, params)
        out = bound(tokens, segments_BT=mask, run=run, replay=replay)
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        logprobs = bound.head.logprobs(out.hidden_BTD, targets, run)
        return jnp.sum(logprobs[:, :-1], where=mask[:, 1:] > 0)

    return jax.jit(jax.value_and_grad(objective))


def replay(ids: np.ndarray, recorded: np.ndarray | None = None) -> Replay:
    """Routes [L, B, T, C] as the model takes them; rows of -1 become `recorded` False."""
    missing = ids < 0
    if recorded is None and missing.any():
        recorded = ~missing.any(axis=-1)
    return Replay(
        jnp.asarray(np.where(missing, 0, ids), jnp.uint8),
        None if recorded is None else jnp.asarray(recorded),
    )


def plans(ids: np.ndarray, valid: np.ndarray, experts: int, run: Execution) -> Plan:
    """Dispatch plans of all layers [L, B, T, C] for a run's mesh and strategy."""
    layout = plan_layout(run.mesh, run.dispatch)
    return Plan(*plan_dispatch(ids, valid, experts=experts, **layout))


def pad_rows(rows: int, *arrays: np.ndarray, axis: int = 0) -> list[np.ndarray]:
    """Appends empty rows (padding tokens) until there are `rows`."""
    extra = [[(0, 0)] * a.ndim for a in arrays]
    for e, a in zip(extra, arrays, strict=True):
        e[axis] = (0, rows - a.shape[axis])
    return [np.pad(a, e) for a, e in zip(arrays, extra, strict=True)]


def published_gradients(name: str, gradients: dict) -> dict[str, np.ndarray]:
    """Our gradient tree under the golden file's names, single experts included."""
    module, _ = model(name)
    prefix = "model.language_model." if name == "tiny-square" else "model."
    named = dict(to_published(gradients, module.config, Naming(prefix=prefix)))
    for key in [k for k in named if k.endswith(("gate_up_proj", "down_proj")) and ".experts." in k]:
        named |= {f"{key}[{e}]": named[key][e] for e in range(len(named[key]))}
    return named


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|, L2."""
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30))


def prompts(name: str) -> list[int]:
    """Numbers of the prompts in generate.npz."""
    archive = np.load(FIXTURES / name / "generate.npz")
    return sorted(int(m[1]) for k in archive.files if (m := re.fullmatch(r"prompt_(\d+)", k)))

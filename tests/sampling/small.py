"""A small model with its engine and scheduler; what it compiles is shared by all tests here."""

import asyncio
import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np

from t1jax.config import SamplerSection
from t1jax.model.config import from_huggingface
from t1jax.model.execution import default_execution
from t1jax.model.qwen3_5 import Qwen3_5, bind, init_params
from t1jax.model.sharding import axis_size, make_mesh
from t1jax.sampling.engine import T1Engine
from t1jax.sampling.scheduler import Scheduler, sizes_of
from t1jax.trajectory.completion import Request
from t1jax.trajectory.record import Sampling

FIXTURES = Path(__file__).parents[1] / "fixtures"
OPTIONS = SamplerSection(slots=4, context=128, prefill_chunk=16, cache_mb=4, steps_per_round=1)
VOCAB = 64


@functools.cache
def model() -> Qwen3_5:
    """Two groups of a delta-net and an attention layer, so that routes pass through the scan."""
    config = from_huggingface(json.loads((FIXTURES / "ref-a" / "config.json").read_text()))
    return Qwen3_5(dataclasses.replace(config, vocab=VOCAB, pattern=("delta", "attention")))


@functools.cache
def execution(mesh: str = ""):
    devices = None if mesh else jax.devices()[:1]
    return default_execution(make_mesh(mesh, devices), dtype="float32", chunk=16)


@functools.cache
def params(mesh: str = "", seed: int = 0):
    return init_params(model(), jax.random.key(seed), execution(mesh).mesh)


def engine(options: SamplerSection = OPTIONS, mesh: str = "", **more) -> T1Engine:
    return T1Engine(model().config, execution(mesh), sizes_of(options), **more)


def scheduler(options: SamplerSection = OPTIONS, mesh: str = "", seed: int = 0) -> Scheduler:
    return Scheduler(engine(options, mesh), params(mesh, seed), options)


def request(prompt, tokens=8, *, session="", stops=(), **sampling) -> Request:
    return Request(
        prompt=np.asarray(prompt, np.int32), max_tokens=tokens, sampling=Sampling(**sampling),
        stop_ids=frozenset(stops), session=session,
    )  # fmt: skip


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def run(work, options: SamplerSection = OPTIONS, mesh: str = "", seed: int = 0):
    """`work(scheduler)` in an event loop of its own."""

    async def inside():
        async with scheduler(options, mesh, seed) as ours:
            return await asyncio.wait_for(work(ours), 300)

    return asyncio.run(inside())


@functools.cache
def scorer(mesh: str = ""):
    """Jitted (params, tokens [B, T], lengths [B]) -> logits and routes: one pass, no cache."""
    execute = execution(mesh)

    @functools.partial(jax.jit, compiler_options=execute.compiler_options)
    def score(params, tokens, lengths):
        real = (np.arange(tokens.shape[1]) < lengths[:, None]).astype("int32")
        bound = bind(model(), params)
        out = bound(tokens, segments_BT=real, run=execute)
        return bound.head(out.hidden_BTD, execute), out.routes_LBTC

    return score


def scored(streams, mesh: str = "", seed: int = 0):
    """Logits [T, V] and routes [T, L, C] of each stream, by a pass over whole rows."""
    rows = -(-len(streams) // 8) * 8
    assert rows % axis_size(execution(mesh).mesh, "rows") == 0
    tokens = np.zeros((rows, OPTIONS.context), np.int32)
    lengths = np.zeros(rows, np.int32)
    for i, stream in enumerate(streams):
        tokens[i, : len(stream)], lengths[i] = stream, len(stream)
    parts = [slice(i, i + 8) for i in range(0, rows, 8)]
    out = [jax.device_get(scorer(mesh)(params(mesh, seed), tokens[p], lengths[p])) for p in parts]
    logits = np.concatenate([x for x, _ in out])
    routes = np.moveaxis(np.concatenate([x for _, x in out], axis=1), 0, 2)
    return [(logits[i, :n], routes[i, :n]) for i, n in enumerate(lengths[: len(streams)])]


def logprobs(logits: np.ndarray, temperature: float) -> np.ndarray:
    """log softmax(logits / temperature) in float64; temperature 0 reports that of 1."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    scaled -= scaled.max(axis=-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))

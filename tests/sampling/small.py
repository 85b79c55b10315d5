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
from t1jax.model.moe import Replay
from t1jax.model.qwen3_5 import Qwen3_5, bind, init_params
from t1jax.model.sharding import make_mesh
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
    """Random weights; those of another seed are the first ones times 1.5 ** seed."""
    if seed:  # a second initializer would be compiled for its keys
        return jax.tree.map(lambda x: x * np.float32(1.5**seed), params(mesh))
    return init_params(model(), jax.random.key(0), execution(mesh).mesh)


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
def scorer():
    """Jitted (params, tokens [B, T], lengths [B], routes) -> logits, live routes; no cache."""
    execute = execution()

    @functools.partial(jax.jit, compiler_options=execute.compiler_options)
    def score(params, tokens, lengths, replay):
        real = (np.arange(tokens.shape[1]) < lengths[:, None]).astype("int32")
        bound = bind(model(), params)
        out = bound(tokens, segments_BT=real, run=execute, replay=replay)
        return bound.head(out.hidden_BTD, execute), out.live_routes_LBTC

    return score


def scored(streams, routes=None):
    """Logits [N, V] and live routes [N, L, C] of each stream, by passes over whole rows.

    `routes`: those of each stream but for its last token, which are replayed.
    """
    out = []
    for begin in range(0, len(streams), 8):
        rows = streams[begin : begin + 8]
        tokens, lengths = np.zeros((8, OPTIONS.context), np.int32), np.zeros(8, np.int32)
        config = model().config
        ids = np.zeros((config.layers, 8, OPTIONS.context, config.moe.chosen), np.uint8)
        recorded = np.zeros(ids.shape[:3], bool)
        for i, stream in enumerate(rows):
            tokens[i, : len(stream)], lengths[i] = stream, len(stream)
            if routes is not None:
                ids[:, i, : len(stream) - 1] = np.moveaxis(routes[begin + i], 1, 0)
                recorded[:, i, : len(stream) - 1] = True
        logits, live = jax.device_get(scorer()(params(), tokens, lengths, Replay(ids, recorded)))
        out += [
            (logits[i, :n], np.moveaxis(live[:, i, :n], 1, 0))
            for i, n in enumerate(lengths[: len(rows)])
        ]
    return out


def logprobs(logits: np.ndarray, temperature: float) -> np.ndarray:
    """log softmax(logits / temperature) in float64; temperature 0 reports that of 1."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    scaled -= scaled.max(axis=-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))

"""Worker: the tasks of t1jax's sampler, with weights that the reference reads too."""

import asyncio
import functools
import time

import jax
import numpy as np
from model_sizes import CACHED, DECODE_STEPS, document
from workers import Task, serve

from t1jax.checkpoint.huggingface import load_params
from t1jax.config import SamplerSection
from t1jax.model.config import from_huggingface
from t1jax.model.execution import default_execution
from t1jax.model.qwen3_5 import Qwen3_5
from t1jax.sampling.engine import Draw, T1Engine
from t1jax.sampling.scheduler import Scheduler, sizes_of
from t1jax.trajectory.completion import Request
from t1jax.trajectory.record import Sampling

CONTEXT = 1536
PROMPT = 1000
NEW = 32  # tokens of each kind in a turn of a conversation


@functools.cache
def subject(folder: str):
    """The model and its weights."""
    model = Qwen3_5(from_huggingface(document()))
    return model, jax.block_until_ready(load_params(folder, model, dtype="float32"))


@functools.cache
def engine(folder: str, slots: int, capture_routes: bool = True, context: int = CONTEXT):
    model, _ = subject(folder)
    options = SamplerSection(
        slots=slots, context=context, prefill_chunk=512, capture_routes=capture_routes,
        cache_mb=4096,
    )
    run = default_execution(dtype="float32")
    return T1Engine(model.config, run, sizes_of(options)), options


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 8192, length).astype(np.int32)


class Decode:
    """Decoding of `rows` slots that begin with CACHED tokens, `steps` in each call."""

    def __init__(self, folder: str, rows: int, capture_routes: bool = True, steps: int = 1):
        self.engine, _ = engine(folder, rows, capture_routes)
        _, self.params = subject(folder)
        self.steps, self.left = steps, 0

    def make_room(self) -> None:
        if self.left < DECODE_STEPS:
            self.state = self.engine.init_decode_state()
            for slot in range(self.engine.sizes.slots):
                prefix = self.engine.prefill(
                    params=self.params, padded_tokens=prompt(CACHED, slot), true_length=CACHED
                )
                draw = Draw(temperature=1.0, seed=slot)
                self.state = self.engine.insert(prefix, self.state, slot, draw=draw)
            self.left = CACHED
        jax.block_until_ready(self.state)

    def run(self) -> None:
        for _ in range(DECODE_STEPS // self.steps):
            self.state, result = self.engine.generate(self.params, self.state, steps=self.steps)
            result.convert_to_numpy()
        self.left -= DECODE_STEPS


def decode_task(**arguments) -> Task:
    decode = Decode(**arguments)
    return Task(run=decode.run, before=decode.make_room)


def first_token_task(folder: str) -> Task:
    """From a prompt on the host to its first sampled token on the host."""
    own, _ = engine(folder, 1)
    _, params = subject(folder)
    tokens = prompt(PROMPT)

    def run():
        prefix = own.prefill(params=params, padded_tokens=tokens, true_length=PROMPT)
        state = own.insert(prefix, own.init_decode_state(), 0)
        own.generate(params, state)[1].convert_to_numpy()

    return Task.in_a_row(run)


def scheduled(folder: str, rows: int, tokens: int) -> dict[str, float]:
    """Shares of the scheduler's time while `rows` requests decode together."""
    own, options = engine(folder, rows)
    _, params = subject(folder)

    async def work():
        async with Scheduler(own, params, options) as ours:
            requests = [
                Request(prompt=prompt(CACHED, i), max_tokens=tokens, sampling=Sampling(seed=i))
                for i in range(rows)
            ]
            await asyncio.gather(*map(ours.complete, requests))
            before, began_s = ours.counters, time.perf_counter()
            await asyncio.gather(*map(ours.complete, requests))
            after, seconds = ours.counters, time.perf_counter() - began_s
            steps = after.decode_steps - before.decode_steps
            return {
                "host_ms": 1e3 * (after.host_s - before.host_s) / steps,
                "engine_ms": 1e3 * (after.engine_s - before.engine_s) / steps,
                "seconds": seconds, "steps": steps,
                "compilations": after.compilations - before.compilations,
            }  # fmt: skip

    return asyncio.run(work())


def conversation(folder: str, turns: int) -> list[dict[str, float]]:
    """Seconds and tokens of each turn of one conversation; each adds NEW and samples NEW."""
    own, options = engine(folder, 1, True, 4096)
    _, params = subject(folder)

    async def talk(ours, session):
        stream, seen = prompt(64), []
        for turn in range(turns):
            stream = np.concatenate([stream, prompt(NEW, turn)])
            before, began_s = ours.counters, time.perf_counter()
            done = await ours.complete(Request(
                prompt=stream, max_tokens=NEW, session=session, sampling=Sampling(seed=turn)
            ))
            seconds, after = time.perf_counter() - began_s, ours.counters
            stream = np.concatenate([stream, done.ids])
            seen.append({
                "seconds": seconds, "read": after.prefill_tokens - before.prefill_tokens,
                "stream": len(stream),
            })  # fmt: skip
        return seen

    async def work():
        async with Scheduler(own, params, options) as ours:
            await talk(ours, "warm-up")
            return await talk(ours, "timed")

    return asyncio.run(work())


def mixed_load(folder: str, seconds: float) -> dict[str, float]:
    """Compilations after a warm-up under requests of many lengths, settings and endings."""
    own, options = engine(folder, 4, True, 512)
    _, params = subject(folder)
    rng = np.random.default_rng(0)

    async def one(ours, number):
        stream = prompt(int(rng.integers(1, 300)), number)
        for turn in range(int(rng.integers(1, 4))):
            task = asyncio.ensure_future(ours.complete(Request(
                prompt=stream, max_tokens=int(rng.integers(1, 40)), session=f"{number}",
                stop_ids=frozenset(rng.integers(0, 8192, 2).tolist()),
                sampling=Sampling(
                    temperature=float(rng.choice([0, 0.6, 1])), top_p=float(rng.choice([0.9, 1])),
                    top_k=int(rng.choice([0, 20])), seed=turn,
                ),
            )))  # fmt: skip
            if rng.random() < 0.1:
                await asyncio.sleep(0.05)
                task.cancel()
                return
            done = await task
            stream = np.concatenate([stream, done.ids, prompt(int(rng.integers(1, 40)), turn)])

    async def work():
        async with Scheduler(own, params, options) as ours:
            end, number, warm = time.perf_counter() + seconds, 0, None
            while time.perf_counter() < end:
                done = await asyncio.gather(
                    *(one(ours, number + i) for i in range(8)), return_exceptions=True
                )
                wrong = [x for x in done if isinstance(x, Exception)]
                assert not wrong, wrong
                number += 8
                if warm is None and number >= 48:
                    warm = ours.counters
            now = ours.counters
            return {
                "requests": number, "warm_up": warm.compilations, "steps": now.decode_steps,
                "after": now.compilations - warm.compilations, "sampled": now.sampled_tokens,
            }  # fmt: skip

    return asyncio.run(work())


def decode_bytes(folder: str, rows: int) -> int:
    """Weights that a step must read: all but the embedding and experts that no row visited."""
    decode = Decode(folder, rows)
    decode.make_room()
    _, result = decode.engine.generate(decode.params, decode.state)
    routes_BLC = np.asarray(result.routes[:, 0])
    chosen = sum(len(np.unique(routes_BLC[:, layer])) for layer in range(routes_BLC.shape[1]))
    model, params = subject(folder)
    experts = sum(
        layer["moe"][name].nbytes for layer in params["groups"].values()
        for name in ("gate_up", "down")
    )
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["embed"].nbytes
    held = model.config.layers * model.config.moe.experts
    return whole - experts + experts * chosen // held


def route_bytes(folder: str) -> dict[str, int]:
    own, _ = engine(folder, 16)
    _, params = subject(folder)
    _, result = own.generate(params, own.init_decode_state())
    config = own.config
    return {
        "bytes": result.routes.nbytes // 16, "layers": config.layers, "chosen": config.moe.chosen,
    }  # fmt: skip


def read_task(folder: str) -> Task:
    """Reads every expert weight once and adds it up: the rate at which weights can be read."""
    leaves = _experts(folder)
    total = jax.jit(lambda leaves: sum(leaf.sum() for leaf in leaves))
    return Task(run=lambda: total(leaves).block_until_ready(), repeats=3)


def copy_task(folder: str) -> Task:
    """Reads and writes as many bytes as the experts have, in memory that is there already."""
    add = jax.jit(lambda leaves: [leaf + np.float32(1) for leaf in leaves], donate_argnums=0)
    held = [jax.jit(lambda leaf: leaf * np.float32(2))(leaf) for leaf in _experts(folder)]

    def run():
        nonlocal held
        held = jax.block_until_ready(add(held))

    return Task(run=run, repeats=3)


def _experts(folder: str):
    layers = subject(folder)[1]["groups"].values()
    return [layer["moe"][name] for layer in layers for name in ("gate_up", "down")]


def read_bytes(folder: str) -> int:
    """What `read_task` reads in one run, and `copy_task` reads and writes."""
    return sum(leaf.nbytes for leaf in _experts(folder))


if __name__ == "__main__":
    serve(
        {"decode": decode_task, "first_token": first_token_task, "read": read_task,
         "copy": copy_task},
        {"scheduled": scheduled, "conversation": conversation, "decode_bytes": decode_bytes,
         "read_bytes": read_bytes, "mixed_load": mixed_load, "route_bytes": route_bytes},
    )  # fmt: skip

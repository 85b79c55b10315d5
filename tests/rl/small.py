"""A small policy and critic, and the same episodes packed and not, for tests of the steps.

Four layers in two groups, so that routes pass through the scan; every ratio of the real model.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax

from t1jax.model.config import from_huggingface
from t1jax.model.execution import Execution, default_execution
from t1jax.model.moe import Plan, Replay, plan_layout
from t1jax.model.qwen3_5 import Qwen3_5, init_params
from t1jax.model.sharding import make_mesh
from t1jax.rl.inputs import Batch, Routes
from t1jax.rl.optimizer import Optimizer
from t1jax.trajectory.routes import plan_dispatch

FIXTURES = Path(__file__).parents[1] / "fixtures"
LENGTHS = (16, 9, 13, 15, 5, 11, 2, 14)
ROWS = {  # layout: which episodes stand in each row, and the row's columns
    "unpacked": ([[i] for i in range(8)], 16),
    "packed": ([[0, 1], [2, 3], [4, 5, 6], [7]], 32),
}

# Its state holds the gradient it was given, exactly; the parameters stay as they are.
GRADIENT = Optimizer(optax.chain(optax.trace(decay=0.0), optax.scale(0.0)))


def gradient_of(learner):
    return jax.tree.map(np.asarray, learner.state.inner[0].trace)


@functools.cache
def model(head: str = "lm") -> Qwen3_5:
    config = from_huggingface(json.loads((FIXTURES / "ref-a" / "config.json").read_text()))
    small = dataclasses.replace(config, vocab=64, pattern=("delta", "attention"))
    return Qwen3_5(small, head)


def execution(mesh: str = "", **changes) -> Execution:
    run = {"dtype": "float32", "chunk": 8, **changes}
    return default_execution(make_mesh(mesh, jax.devices()[: 1 if not mesh else None]), **run)


def params(run: Execution, head: str = "lm", dtype: str = "float32"):
    return init_params(model(head), jax.random.key(7), run.mesh, dtype)


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode, with a number per token for each of the arrays of a step."""

    tokens: np.ndarray  # [N]
    sampled: np.ndarray  # [N]
    routes: np.ndarray  # [N, L, C]
    numbers: dict[str, np.ndarray]  # [N]: column t is about token t


@functools.cache
def episodes() -> tuple[Episode, ...]:
    rng = np.random.default_rng(0)
    config = model().config

    def one(length):
        routes = np.stack([
            [rng.permutation(config.moe.experts)[: config.moe.chosen] for _ in range(config.layers)]
            for _ in range(length)
        ])
        numbers = {name: rng.normal(size=length) for name in ("noise", "advantages", "returns")}
        sampled = (rng.random(length) < 0.7) & (np.arange(length) > 0)
        return Episode(rng.integers(0, config.vocab, length), sampled, routes, numbers)

    return tuple(one(length) for length in LENGTHS)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The episodes in one layout: numpy, as the loader makes them."""

    batch: Batch
    ids: np.ndarray  # [L, B, T, C]
    recorded: np.ndarray  # [B, T]: not the last token of an episode, which was never an input
    numbers: dict[str, np.ndarray]  # [B, T], NaN wherever there is none

    def routes(self, run: Execution | None = None, shift: int = 0) -> Routes:
        """Replay where recorded; with `run` everything is replayed, and planned for its mesh."""
        ids = np.roll(self.ids, shift, axis=2).astype(np.uint8)
        if run is None:
            recorded = np.broadcast_to(self.recorded, ids.shape[:-1])
            return Routes(Replay(ids, recorded))
        valid = self.batch.segments_BT > 0
        layout = plan_layout(run.mesh, run.dispatch)
        plan = plan_dispatch(ids, valid, experts=model().config.moe.experts, **layout)
        return Routes(Replay(ids, None), Plan(*plan))


def rows(inputs, index: slice):
    """Some rows of a step's inputs; only the routes have another axis in front."""
    cut = lambda tree: jax.tree.map(lambda x: x[index], tree)  # noqa: E731
    routes = jax.tree.map(lambda x: x[:, index], inputs.routes)
    return cut(inputs._replace(routes=None))._replace(routes=routes)


def pack(layout: str) -> Packed:
    """Token by token: column t takes token t, and all that belongs to token t + 1."""
    rows, T = ROWS[layout]
    B, config = len(rows), model().config
    ints = {f: np.zeros((B, T), np.int32) for f in ("tokens", "targets", "positions", "segments")}
    mask, recorded = np.zeros((2, B, T), bool)
    ids = np.zeros((config.layers, B, T, config.moe.chosen), np.int32)
    ids[..., :] = np.arange(config.moe.chosen)
    numbers = {n: np.full((B, T), np.nan) for n in episodes()[0].numbers}
    for b, members in enumerate(rows):
        column = 0
        for segment, member in enumerate(members, start=1):
            episode = episodes()[member]
            for t in range(len(episode.tokens)):
                at = (b, column)
                ints["tokens"][at], ints["positions"][at] = episode.tokens[t], t
                ints["segments"][at], ids[:, b, column] = segment, episode.routes[t]
                if t + 1 < len(episode.tokens):
                    ints["targets"][at], mask[at] = episode.tokens[t + 1], episode.sampled[t + 1]
                    recorded[at] = True
                    for name, x in numbers.items():
                        x[at] = episode.numbers[name][t + 1]
                column += 1
    batch = Batch(**{f"{name}_BT": x for name, x in ints.items()}, mask_BT=mask)
    return Packed(batch, ids, recorded, {n: x.astype(np.float32) for n, x in numbers.items()})


def unpack(layout: str, x_BT) -> list[np.ndarray]:
    """Each episode's columns, in the episodes' order."""
    rows, _ = ROWS[layout]
    found = {}
    for b, members in enumerate(rows):
        column = 0
        for member in members:
            found[member] = np.asarray(x_BT)[b, column : column + LENGTHS[member]]
            column += LENGTHS[member]
    return [found[i] for i in range(len(LENGTHS))]

"""Trajectories of chosen lengths, for tests of packing and order."""

import numpy as np

from t1jax.trajectory.io import save_trajectory
from t1jax.trajectory.record import Ending, Finish, RouteShape, Trajectory
from t1jax.trajectory.recorder import Recorder

SHAPE = RouteShape(layers=3, chosen=3, experts=16)  # as many layers as choices: a swap must show


def routes(first: int, last: int, shape: RouteShape = SHAPE) -> np.ndarray:
    """(7 l + 13 t + j) mod E at token t, layer l, choice j."""
    t, layer, j = np.ogrid[first:last, : shape.layers, : shape.chosen]
    return ((7 * layer + 13 * t + j) % shape.experts).astype(shape.dtype)


def trajectory(
    length: int, *, prompt: int = 2, task: str = "demo/a", reward: float | None = 0.5,
    outcome: str = "partial", tail: int = 0, first_id: int = 100, version: int = 0,
    shape: RouteShape = SHAPE,
) -> Trajectory:  # fmt: skip
    """`prompt` given tokens, sampled ones, `tail` tokens of tool output; id t is first_id + t."""
    ids = np.arange(first_id, first_id + length)
    recorder = Recorder(shape)
    recorder.append_context(ids[:prompt])
    sampled = ids[prompt : length - tail]
    logprobs = -np.arange(1, len(sampled) + 1) / 8
    recorder.append_sampled(sampled, logprobs, version=version, finish=Finish.stop)
    recorder.append_context(ids[length - tail :])
    recorder.record_routes(0, routes(0, length - 1, shape))
    return recorder.finish(Ending(task=task, outcome=outcome, reward=reward))


def folder(path, lengths, **options) -> str:
    """A folder with a trajectory of each length; ids tell them apart."""
    for number, length in enumerate(lengths):
        options["first_id"] = 1000 * (number + 1)
        save_trajectory(trajectory(length, **options), path / f"t{number:03}")
    return str(path)

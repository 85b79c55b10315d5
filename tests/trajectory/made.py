"""Trajectories made up for tests. Every route row has ids of its own, so that a shift shows."""

import dataclasses

import numpy as np

from t1jax.trajectory.record import Ending, Finish, RouteShape, Trajectory
from t1jax.trajectory.recorder import Recorder

SHAPE = RouteShape(layers=8, chosen=8, experts=64)  # as many layers as choices: a swap must show
ENDING = Ending(task="demo/count", outcome="partial", reward=0.15, timings={"agent": 1.5})


def rows(first: int, last: int, shape: RouteShape = SHAPE) -> np.ndarray:
    """Routes of tokens first..last-1: (7 l + 13 t + j) mod E at token t, layer l, choice j."""
    t = np.arange(first, last)[:, None, None]
    layer = np.arange(shape.layers)[None, :, None]
    j = np.arange(shape.chosen)[None, None, :]
    return ((7 * layer + 13 * t + j) % shape.experts).astype(shape.dtype)


def turn(
    recorder: Recorder, context: list[int], sampled: list[int], *, version: int = 0, shape=SHAPE
) -> None:
    """A turn of the native loop: the engine reads what is new, then samples."""
    first = max(len(recorder) - 1, 0)  # the last token of the turn before is read first
    recorder.append_context(np.array(context))
    logprobs = -np.arange(1, len(sampled) + 1) / 8
    recorder.append_sampled(np.array(sampled), logprobs, version=version, finish=Finish.stop)
    recorder.record_routes(first, rows(first, len(recorder) - 1, shape))


def two_turns(**options) -> Trajectory:
    """3 + 2 tokens, then 2 + 2."""
    recorder = Recorder(SHAPE, **options)
    turn(recorder, [10, 11, 12], [20, 21], version=3)
    turn(recorder, [13, 14], [22, 23], version=4)
    return recorder.finish(ENDING)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Every column, fact and bit."""
    return (
        a.ending == b.ending
        and len(a.chunks) == len(b.chunks)
        and all(map(_same, a.chunks, b.chunks))
    )


def _same(a, b) -> bool:
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or not np.array_equal(x, y):
                return False
        elif x != y:
            return False
    return True

"""The token task's checkpoint and recorded trajectories, made once."""

import numpy as np
import pytest

from t1jax.trajectory.io import save_trajectory
from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder

from . import bandit

COUNT = 32


@pytest.fixture(scope="session")
def bandit_checkpoint(tmp_path_factory):
    return bandit.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def bandit_trajectories(tmp_path_factory):
    """32 trajectories: a prompt of two tokens, two tokens at random after it, a reward by them."""
    root, random = tmp_path_factory.mktemp("trajectories"), np.random.default_rng(0)
    shape = RouteShape(layers=4, chosen=2, experts=8)
    for number in range(COUNT):
        recorder = Recorder(shape)
        recorder.append_context(np.array([number % 8, number // 8]))
        sampled = random.integers(0, bandit.VOCAB, bandit.SAMPLED)
        recorder.append_sampled(sampled, np.full(2, -2.0), version=0, finish=Finish.stop)
        ending = Ending(task=f"made/{number}", outcome="solved", reward=(number % 8) / 7)
        save_trajectory(recorder.finish(ending), root / f"{number:02d}")
    return root

"""SFT and the critic's warm-up on recorded trajectories: they learn, and go on bit for bit."""

import asyncio
import json
import shutil

import jax
import numpy as np
import pytest

from t1jax.errors import UserError
from t1jax.pipeline import critic as warm_up
from t1jax.pipeline.critic import critic
from t1jax.pipeline.learning import load_policy, open_setup
from t1jax.pipeline.metrics import read_metrics
from t1jax.pipeline.session import session
from t1jax.pipeline.sft import sft

from . import bandit
from .conftest import COUNT

pytestmark = pytest.mark.slow
RATE = {"learning_rate": 0.01, "weight_decay": 0.0}
BATCH = {"tokens": 32, "rows": 8}


@pytest.fixture
def source(bandit_checkpoint):
    return bandit_checkpoint


@pytest.fixture
def folder(bandit_trajectories):
    return bandit_trajectories


def sft_config(run, source, folder):
    section = {
        "trajectories": str(folder), "epochs": 60, "batch_trajectories": COUNT,
        "optimizer": RATE | {"schedule": "cosine"}, "batch": BATCH,
    }  # fmt: skip
    return bandit.config(run, source, sft=section, checkpoints={"every_steps": 20, "keep_last": 9})


def critic_config(run, source, folder, **changes):
    section = {
        "trajectories": str(folder), "epochs": 60, "batch_trajectories": COUNT, "rollouts": 0,
        "optimizer": RATE, "batch": BATCH, "value_clip": 10.0,
    }  # fmt: skip
    return bandit.config(run, source, critic=section | changes)


def weights(config):
    setup = open_setup(config)
    return jax.tree.map(np.asarray, load_policy(setup, f"{config.run}/weights/sft"))


def test_sft_memorises_32_trajectories_and_a_killed_run_ends_with_the_same_bits(
    tmp_path, source, folder
):
    config = sft_config(tmp_path / "run", source, folder)
    sft(config)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run", "sft")]
    assert losses[0] > 2 and losses[-1] < 0.1, losses
    whole = weights(config)
    # What a run killed after step 20 leaves: later states and the weights are not there.
    for gone in ("checkpoints/sft/40", "checkpoints/sft/60", "weights"):
        shutil.rmtree(tmp_path / "run" / gone)
    sft(config)
    assert [row["loss"] for row in read_metrics(tmp_path / "run", "sft")] == losses
    jax.tree.map(np.testing.assert_array_equal, weights(config), whole)


def test_warming_up_explains_returns_and_leaves_the_policy_as_it_is(tmp_path, source, folder):
    config = critic_config(tmp_path, source, folder)
    setup = open_setup(config)
    entries = warm_up.recorded(config)
    _, total = warm_up.count_steps(config.critic, entries)
    programs = warm_up.make_programs(setup, config.critic, total)
    policy = load_policy(setup, config.model.checkpoint)
    before = jax.tree.map(lambda x: np.array(x), policy)
    with session(setup, "critic", total=total, shown=()) as stage:
        asyncio.run(warm_up.warm_up(setup, programs, policy, entries, stage))
    jax.tree.map(np.testing.assert_array_equal, policy, before)
    rows = read_metrics(tmp_path, "critic")
    assert abs(rows[0]["value_mean"] - np.mean(np.arange(8) / 7)) < 1e-6  # the head's bias
    assert rows[0]["explained_variance"] < 0.1
    assert rows[-1]["explained_variance"] > 0.9, [row["explained_variance"] for row in rows]


def test_nothing_to_learn_from_is_refused(tmp_path, source, folder):
    with pytest.raises(UserError, match="nothing to warm up on"):
        critic(critic_config(tmp_path, source, "", rollouts=0))
    with pytest.raises(UserError, match="no directory; expected a folder of trajectories"):
        sft(sft_config(tmp_path, source, tmp_path / "nowhere"))
    unsolved = tmp_path / "unsolved"
    shutil.copytree(folder / "00", unsolved / "00")
    document = json.loads((unsolved / "00" / "trajectory.json").read_text())
    (unsolved / "00" / "trajectory.json").write_text(json.dumps(document | {"outcome": "failed"}))
    with pytest.raises(UserError, match="1 unsolved"):
        sft(sft_config(tmp_path, source, unsolved))

"""PPO on a token task without sandboxes: it learns, and goes on bit for bit after any end."""

import asyncio
import dataclasses
import functools
import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from t1jax.errors import Preempted, UserError
from t1jax.pipeline import ppo, update
from t1jax.pipeline.learning import load_policy, open_setup, policy_path
from t1jax.pipeline.metrics import read_metrics
from t1jax.pipeline.session import Session, session

from . import bandit

pytestmark = pytest.mark.slow
STEPS = 4  # of a run that is broken off


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, nothing is saved on the way out."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return bandit.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@functools.cache
def compiled(source, sections):
    """Programs are made once for each kind of run: they do not depend on its folder."""
    config = bandit.config(Path("none"), source, ppo=json.loads(sections))
    setup = open_setup(config)
    return update.make_programs(setup, config.ppo), bandit.make_sampler(setup)


def play(run, source, *, broken=None, every=1, **sections):
    """One command's worth of training; the bandit and the last parameters."""
    config = bandit.config(run, source, ppo=sections, checkpoints={"every_steps": every})
    setup = open_setup(config)
    fixed = {
        name: value
        for name, value in sections.items()
        if name not in ("steps", "staleness", "offload")
    }
    programs, sampler = compiled(source, json.dumps(fixed))
    player = bandit.Bandit(setup, sampler, broken=broken)
    with session(setup, "ppo", total=config.ppo.steps, shown=()) as stage:
        params = asyncio.run(
            ppo.train(
                setup, programs, stage, first(setup), player.collect, player.publish,
                lambda step: (None,) * config.ppo.launch,
            )
        )  # fmt: skip
    return player, jax.tree.map(np.asarray, params)


def first(setup):
    """The weights that PPO begins with; training takes them over."""
    return load_policy(setup, policy_path(setup.config, "ppo"))


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), a, b)))


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_bandit_is_learned(tmp_path, source, staleness):
    play(tmp_path, source, steps=30 + 4 * staleness, staleness=staleness, every=100)
    rows = read_metrics(tmp_path, "ppo")
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[0] < 0.2
    assert np.mean(rewards[-3:]) > 0.93, rewards
    assert all(row["staleness"] == min(staleness, row["step"]) for row in rows)
    # The sampler is the trainer's own forward pass: with replay there is no gap to explain.
    assert rows[0]["mismatch/train_rollout_logprob_abs_diff"] < 1e-5
    assert rows[0]["replay_replace_rate"] < 0.01 and rows[0]["routes_missing"] == 0
    if staleness == 0:
        assert all(row["approximate_kl"] == 0 and row["clip_fraction"] == 0 for row in rows)
    else:
        assert any(row["approximate_kl"] > 0 for row in rows)


@functools.cache
def unbroken(source, staleness):
    folder = Path(source).parent / f"unbroken-{staleness}"
    _, params = play(folder, source, steps=STEPS, staleness=staleness)
    return params, [_numbers(row) for row in read_metrics(folder)]


def _numbers(row):
    timed = ("time", "tokens_per_s")
    return {n: x for n, x in row.items() if n not in timed and not n.startswith("seconds")}


# A step that was being saved is set aside, with a warning.
@pytest.mark.filterwarnings("ignore:.*going on from step")
@pytest.mark.parametrize(
    ("staleness", "stage", "step"),
    [(0, "rollout", 2), (0, "critic", 1), (0, "actor", 3), (0, "saving", 2),
     (1, "rollout", 2), (1, "actor", 2)],
)  # fmt: skip
def test_a_killed_run_goes_on_with_the_same_bits(
    tmp_path, source, monkeypatch, staleness, stage, step
):
    def kill(where, number):
        if (where, number) == (stage, step):
            raise Killed

    with monkeypatch.context() as patch:
        _kill_in(patch, stage, step)
        with pytest.raises(Killed):
            play(tmp_path, source, steps=STEPS, staleness=staleness, broken=kill)
    _, params = play(tmp_path, source, steps=STEPS, staleness=staleness)
    wanted, rows = unbroken(source, staleness)
    assert same(params, wanted)
    assert [_numbers(row) for row in read_metrics(tmp_path)] == rows


def _kill_in(patch, stage, step):
    """Breaks a phase of a step; a rollout is broken by the bandit itself."""
    name = {"critic": "_train_critic", "actor": "_train_actor"}.get(stage)
    if name is not None:
        inner, calls = getattr(update.Updater, name), iter(range(100))

        def broken(self, *arguments):
            result = inner(self, *arguments)
            if next(calls) == step:
                raise Killed
            return result

        patch.setattr(update.Updater, name, broken)
    if stage == "saving":
        save = Session.save

        def torn(self, number, *arguments):
            save(self, number, *arguments)
            if number == step:
                self._states.wait()
                shutil.rmtree(self._states._folder / str(number) / "critic")
                raise Killed

        patch.setattr(Session, "save", torn)


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, source):
    def signalled(where, step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted, match=r"ppo is saved after step 2 of 4"):
        play(tmp_path, source, steps=STEPS, staleness=0, broken=signalled, every=100)
    _, params = play(tmp_path, source, steps=STEPS, staleness=0, every=100)
    assert same(params, unbroken(source, 0)[0])


def test_a_run_that_offloads_keeps_its_bits_and_goes_on(tmp_path, source, monkeypatch):
    """What no phase uses lies in the host's memory, where a state is saved from as well."""
    kinds = []

    def seen(self, step, trees, *arguments):
        actor, critic = trees["actor"], trees["critic"]
        parts = (actor.params, actor.state, critic.params, critic.state)
        kinds.append([jax.tree.leaves(part)[-1].sharding.memory_kind for part in parts])
        done(self, step, trees, *arguments)

    done = Session.done
    monkeypatch.setattr(Session, "done", seen)
    play(tmp_path, source, steps=2, staleness=0, offload=True)
    _, params = play(tmp_path, source, steps=STEPS, staleness=0, offload=True)
    assert kinds == [["device", "pinned_host", "pinned_host", "pinned_host"]] * STEPS
    assert same(params, unbroken(source, 0)[0])


def test_other_ways_to_train_change_what_they_say_and_learn(tmp_path, source):
    """Group baseline, minibatches and a correction for the sampler, in one run."""
    player, _ = play(
        tmp_path, source, steps=3, baseline="group", group=2, minibatches=2,
        importance="truncated", every=100,
    )  # fmt: skip
    rows = read_metrics(tmp_path)
    assert "explained_variance" not in rows[0] and "value_loss" not in rows[0]
    assert rows[0]["approximate_kl"] > 0  # the second minibatch meets a policy that moved
    assert player.calls[:3] == [("publish", 0), ("collect", 0, 0), ("publish", 1)]


class Spoiled(bandit.Bandit):
    """Hands over what a step must refuse."""

    def __init__(self, *arguments, spoil):
        super().__init__(*arguments)
        self._spoil = spoil

    async def collect(self, step, version, tasks, *, wanted):
        return self._spoil(await super().collect(step, version, tasks, wanted=wanted))


def _first(rollout, **changes):
    first, *others = rollout.trajectories
    chunk = dataclasses.replace(first.chunks[0], **changes)
    first = dataclasses.replace(first, chunks=(chunk,))
    return dataclasses.replace(rollout, trajectories=(first, *others))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: dataclasses.replace(r, trajectories=(), counts={"infra_error": 64}),
         r"no graded trajectory \(infra_error 64\)"),
        (lambda r: _first(r, versions=r.trajectories[0].chunks[0].versions + 7),
         r"trajectory 0 of task bandit/0 was sampled by weights \[7\]; expected 0 alone"),
        (lambda r: _first(r, recorded=np.array([True, False, True])),
         r"lacks the routes of 1 of 3 tokens"),
    ],
)  # fmt: skip
def test_a_rollout_that_cannot_be_trained_on_is_refused_and_nothing_is_lost(
    tmp_path, source, spoil, message
):
    config = bandit.config(tmp_path, source)
    setup = open_setup(config)
    programs, sampler = compiled(source, "{}")
    player = Spoiled(setup, sampler, spoil=spoil)
    with (
        session(setup, "ppo", total=2, shown=()) as stage,
        pytest.raises(UserError, match=message),
    ):
        asyncio.run(
            ppo.train(
                setup,
                programs,
                stage,
                first(setup),
                player.collect,
                player.publish,
                lambda step: (),
            )
        )
    assert read_metrics(tmp_path) == []


def test_rows_that_the_mesh_does_not_divide_are_refused(tmp_path, source):
    model = {"checkpoint": source, "mesh": "data=8"}
    config = bandit.config(tmp_path, source, model=model, ppo={"batch": {"rows": 2}})
    setup = open_setup(config)
    with pytest.raises(UserError, match=r"batch\.rows=2 does not divide over 8 devices"):
        update.Updater(setup, None, config.ppo)

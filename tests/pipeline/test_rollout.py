"""Many trials: which are kept, cancelled, counted and played again; the command, ended midway."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sandbox import task as tasks
from sandbox.base import BuildError
from sandbox.reports import Source
from sandbox.tasks.make import make
from sandbox.trial import TrialResult
from sandbox.verify import Outcome, Verdict
from t1jax.agent.episode import TRAJECTORY, Episode, Usage
from t1jax.checkpoint.init_tiny import SIZES, train_tokenizer
from t1jax.config import SandboxSection, parse_config, to_yaml
from t1jax.errors import UserError
from t1jax.pipeline.rollout import Rollouts, load_baselines, load_tasks, rollout
from t1jax.pipeline.trials import PLAYED, count, episode_seed, keep_settings, make_jobs, play_all
from t1jax.pipeline.watch import Watch
from t1jax.trajectory.io import load_trajectory, save_trajectory
from t1jax.trajectory.record import Ending, Finish, RouteShape
from t1jax.trajectory.recorder import Recorder

SANDBOX = SandboxSection(jobs=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten tasks of one step: eight to train on, one each to validate and test."""
    out = tmp_path_factory.mktemp("made") / "tasks"
    make(out, seed=0, count=10, levels=(1,), families=("edit", "count"))
    return out


@pytest.fixture(scope="module")
def train(folder):
    return [tasks.load(path) for path in sorted((folder / "train").iterdir())]


class FakePlay:
    """Ends trials when and how a test says, without a sandbox."""

    def __init__(self, outcomes=None, *, slow=()):
        self.outcomes, self.slow, self.played, self.cleaned = outcomes or {}, slow, [], []

    async def __call__(self, job, backend, folder, watch):
        self.played.append(job.name)
        outcome = self.outcomes.get(job.name, Outcome.solved)
        if isinstance(outcome, Exception):
            raise outcome
        try:
            await asyncio.sleep(3600 if job.name in self.slow else 0.001 * (9 - len(self.played)))
        finally:
            self.cleaned.append(job.name)
        passed = {Outcome.solved: "ab", Outcome.partial: "a"}.get(outcome, "")
        broken = outcome is Outcome.infra_error
        verdict = Verdict(
            outcome=outcome, source=Source.ctrf, passed=frozenset(passed), total=2,
            nop_passed=None, rewards={},
        )  # fmt: skip
        result = TrialResult(
            task=job.task.name, agent="fake", outcome=outcome, verdict=None if broken else verdict,
            seconds={"agent": 0.1}, commands=1, attempts=1, folder=folder,
            error="engine gone" if broken else "",
        )  # fmt: skip
        reward = None if broken else len(passed) / 2
        trajectory = made(job, outcome.value, reward)
        save_trajectory(trajectory, folder / TRAJECTORY)
        return Episode(result=result, usage=Usage(turns=1, tokens=3, sampled_tokens=1))


def made(job, outcome, reward):
    recorder = Recorder(RouteShape(layers=0, chosen=0, experts=0))
    recorder.append_context(np.array([1, 2]))
    recorder.append_sampled(
        np.array([3]), np.array([-0.5]), version=job.version, finish=Finish.stop
    )
    return recorder.finish(Ending(task=job.task.name, outcome=outcome, reward=reward))


def names(done):
    return [trajectory.ending.task.removeprefix("t1jax/") for trajectory in done.trajectories]


def test_the_first_to_finish_are_kept_in_the_order_of_the_tasks(train, tmp_path):
    late = {f"{train[0].root.name}__0", f"{train[3].root.name}__0"}
    play = FakePlay(slow=late)
    collect = Rollouts(tmp_path, play, SANDBOX, seed=1)
    done = asyncio.run(collect(5, 2, train[:6], wanted=4))
    # They finish last first: the order is the tasks' all the same.
    assert names(done) == [train[i].root.name for i in (1, 2, 4, 5)]
    families = {train[i].config.metadata["category"] for i in (0, 3)}
    assert {"launched": 6, "graded": 4, "cancelled": 2}.items() <= done.counts.items()
    assert sum(done.counts[f"cancelled/{family}"] for family in families) == 2
    assert late <= set(play.cleaned)
    kept = sorted(path.name for path in (tmp_path / "step-000005").iterdir() if path.is_dir())
    assert kept == sorted(f"{train[i].root.name}__0" for i in (1, 2, 4, 5))


def test_a_step_that_is_on_disk_is_not_played_again(train, tmp_path):
    first = FakePlay({f"{train[1].root.name}__0": Outcome.partial})
    done = asyncio.run(Rollouts(tmp_path, first, SANDBOX, seed=1)(0, 3, train[:3], wanted=2))
    again = FakePlay()
    collect = Rollouts(tmp_path, again, SANDBOX, seed=1)
    same = asyncio.run(collect(0, 3, train[:3], wanted=2))
    assert again.played == [] and names(same) == names(done) and same.counts == done.counts
    newer = asyncio.run(collect(0, 4, train[:3], wanted=2))
    assert len(again.played) == 3
    assert all(t.chunks[0].versions[-1] == 4 for t in newer.trajectories)


def test_finished_trials_of_a_run_that_was_ended_are_kept(train, tmp_path):
    slow = f"{train[2].root.name}__0"

    async def ended():
        collect = Rollouts(tmp_path, FakePlay(slow=(slow,)), SANDBOX, seed=1)
        step = asyncio.ensure_future(collect(0, 0, train[:3], wanted=3))
        while len(list(tmp_path.glob(f"*/*/{PLAYED}"))) < 2:
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(ended())
    again = FakePlay()
    done = asyncio.run(Rollouts(tmp_path, again, SANDBOX, seed=1)(0, 0, train[:3], wanted=3))
    assert again.played == [slow] and len(done.trajectories) == 3


def test_infrastructure_errors_are_no_rewards_and_are_tried_again(train, tmp_path):
    broken = {
        f"{train[0].root.name}__0": Outcome.infra_error,
        f"{train[1].root.name}__0": BuildError("no such base image"),
    }
    jobs = make_jobs(train[:3], seed=0, step=0)

    def play(fake):
        with Watch("test", 3, stream=io.StringIO()) as watch:
            return asyncio.run(play_all(jobs, fake, tmp_path, SANDBOX, watch)), watch.line()

    results, line = play(FakePlay(broken))
    assert [played.graded for played in results] == [False, False, True]
    assert (results[1].error, results[1].fraction) == ("no such base image", None)
    assert count(jobs, results) == {
        "launched": 3, "graded": 1, "cancelled": 0, "infra_error": 2, "outcome/solved": 1
    }  # fmt: skip
    assert "3 of 3 finished" in line and "2 infrastructure errors" in line
    assert "mean reward 1.000" in line
    again = FakePlay()
    results, line = play(again)
    assert sorted(again.played) == sorted(broken) and all(played.graded for played in results)
    assert "1 of them earlier" in line


def test_an_error_of_the_policy_ends_everything(train, tmp_path):
    play = FakePlay({f"{train[1].root.name}__0": UserError("unknown stop token")}, slow="")
    with pytest.raises(UserError, match="unknown stop token"):
        asyncio.run(Rollouts(tmp_path, play, SANDBOX, seed=1)(0, 0, train[:3], wanted=3))


def test_seeds_depend_on_what_is_played_and_not_on_the_order(train):
    jobs = make_jobs([*train[:3], train[0]], seed=3, step=2)
    assert [job.attempt for job in jobs] == [0, 0, 0, 1]
    turned = make_jobs(train[2::-1], seed=3, step=2)
    assert {job.name: job.seed for job in turned}.items() <= {
        job.name: job.seed for job in jobs
    }.items()
    seeds = {
        episode_seed(seed, step, task, attempt)
        for seed in (0, 1) for step in (0, 1) for task in "ab" for attempt in (0, 1)
    }  # fmt: skip
    assert len(seeds) == 16 and all(0 <= seed < 2**32 for seed in seeds)


def test_requests_that_cannot_be_met_are_refused(train, tmp_path):
    collect = Rollouts(tmp_path, FakePlay(), SANDBOX, seed=1)
    with pytest.raises(UserError, match="step 3 wants 5 trajectories of 2 trials"):
        asyncio.run(collect(3, 0, train[:2], wanted=5))
    keep_settings(tmp_path / "r", {"seed": 1})
    keep_settings(tmp_path / "r", {"seed": 1})
    with pytest.raises(UserError, match="trials with seed = 1, and now it is 2; give another"):
        keep_settings(tmp_path / "r", {"seed": 2})


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory):
    """Solutions of the training tasks, with init-tiny's tokenizer."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    train_tokenizer(SIZES["tiny"].vocab).save(str(checkpoint / "tokenizer.json"))
    return parse_config(
        {
            "run": str(tmp_path_factory.mktemp("run")),
            "model": {"checkpoint": str(checkpoint)},
            "tasks": {"folder": str(folder)},
            "agent": {"thinking": False},
            "sandbox": {"jobs": 2},
            "rollout": {"policy": "solution"},
        },
        "test",
    )


def command(config):
    file = Path(config.run) / "config.yaml"
    file.write_text(to_yaml(config))
    program = "from t1jax.cli import main; main()"
    return [sys.executable, "-c", program, "rollout", str(file)]


def test_solutions_become_trajectories_and_a_killed_command_goes_on(config, train):
    folder = Path(config.run) / "trajectories" / "rollout"
    running = subprocess.Popen(command(config), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(folder.glob(f"*/{PLAYED}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 75 and "run it again to go on" in errors.splitlines()[-1]
    finished = {path: path.stat().st_mtime_ns for path in folder.glob(f"*/{PLAYED}")}
    assert 1 <= len(finished) < 8
    done = subprocess.run(command(config), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("8 graded, 0 cancelled, 0 infra_error, 8 outcome/solved")
    assert "of them earlier" in done.stderr.splitlines()[-1]
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    trajectories = [
        load_trajectory(path.parent / TRAJECTORY) for path in folder.glob(f"*/{PLAYED}")
    ]
    assert len(trajectories) == 8
    assert {t.ending.task for t in trajectories} == {task.name for task in train}
    assert all(t.reward == 1.0 and t.chunks[0].sampled_tokens > 0 for t in trajectories)
    with pytest.raises(UserError, match="trials with seed = 0, and now it is 1"):
        rollout(config.model_copy(update={"seed": 1}))


def test_an_audited_list_says_what_counts(config, train, tmp_path):
    file = tmp_path / "list.jsonl"
    lines = [
        {"path": str(task.root), "oracle_passed": ["a", "b"], "nop_passed": ["b"]}
        for task in train[:2]
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = config.tasks.model_copy(update={"train": str(file)})
    listed = config.model_copy(update={"tasks": section})
    assert [task.root for task in load_tasks(listed, "train")] == [t.root for t in train[:2]]
    baselines = load_baselines(listed, "train")
    assert baselines[train[1].root].nop_passed == {"b"} and len(baselines) == 2
    assert load_baselines(config, "train") == {}


def test_a_limit_draws_a_sample_that_a_higher_limit_keeps(config, train):
    three, two = (load_tasks(config, "train", limit=n) for n in (3, 2))
    assert [t.root for t in three[:2]] == [t.root for t in two] and len(three) == 3
    draws = {
        load_tasks(config.model_copy(update={"seed": seed}), "train", limit=1)[0].root
        for seed in range(20)
    }
    assert len(draws) > 1  # not the list's first

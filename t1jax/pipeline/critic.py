"""`t1jax critic`: the critic learns what the policy's episodes are worth, before PPO begins.

    recorded trajectories, then a few rollouts of the policy -> values -> returns -> critic steps

The policy is read and never written: its parameters stay bit-identical, and there is no optimizer
of it. PPO takes over the critic's learner, optimizer included, from RUN/checkpoints/critic.
Rewards are the recorded ones. Returns are lambda-returns with PPO's gamma and lambda (1 and 1
where the config has no `ppo:` section).
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sandbox.task import Task
from t1jax.config import Config, CriticSection, require
from t1jax.data.folder import Entry, list_entries
from t1jax.data.pipeline import Prepared, epochs, reader
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Params
from t1jax.pipeline import measure
from t1jax.pipeline.collect import Collect
from t1jax.pipeline.episodes import measured, named
from t1jax.pipeline.feed import dump, make_feed, read_ahead
from t1jax.pipeline.learning import (
    Setup,
    abstract_critic,
    keep_config,
    load_policy,
    make_optimizer,
    new_critic,
    open_setup,
    policy_path,
)
from t1jax.pipeline.place import Placer, fetched
from t1jax.pipeline.profile import Clock
from t1jax.pipeline.session import Session, session
from t1jax.pipeline.stop import Stopped
from t1jax.rl import steps
from t1jax.rl.inputs import Batch, CriticInputs
from t1jax.rl.optimizer import Optimizer

SHOWN = ("value_loss", "explained_variance", "value_mean", "reward/mean")
Tasks = Callable[[int], Sequence[Task]]  # of a rollout, by its number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What warm-up runs on the devices; compiled once."""

    optimizer: Optimizer
    values: Callable[[Params, Batch], jax.Array]
    step: steps.Step[CriticInputs]


def make_programs(setup: Setup, section: CriticSection, total: int) -> Programs:
    """Programs of a warm-up of `total` steps."""
    optimizer = make_optimizer(section.optimizer, total)
    return Programs(
        optimizer=optimizer,
        values=steps.make_critic_values(setup.critic, setup.run),
        step=steps.make_critic_step(setup.critic, setup.run, optimizer, clip=section.value_clip),
    )


def recorded(config: Config) -> list[Entry]:
    """The trajectories of the section's folder; none where it names no folder."""
    section = require(config, "critic")
    if not section.trajectories:
        return []
    return list_entries(section.trajectories, keep="all", per_task=0, seed=config.seed)[0]


def count_steps(section: CriticSection, entries: Sequence[Entry]) -> tuple[int, int]:
    """Steps on recorded trajectories, and in all."""
    read = section.epochs * -(-len(entries) // section.batch_trajectories)
    if read + section.rollouts == 0:
        raise UserError(
            "critic.rollouts=0 and critic.trajectories is empty: nothing to warm up on; set one"
        )
    return read, read + section.rollouts


def critic(config: Config) -> None:
    """`t1jax critic`.

    Raises:
      UserError: nothing to train on, or a guard stopped the run.
      Preempted: a signal came; the state is saved.
    """
    section = require(config, "critic")
    setup = open_setup(config)
    entries = recorded(config)
    _, total = count_steps(section, entries)
    keep_config(config)
    programs = make_programs(setup, section, total)
    policy = load_policy(setup, policy_path(config, "ppo"))
    with session(setup, "critic", total=total, shown=SHOWN) as stage:
        if section.rollouts == 0:
            asyncio.run(warm_up(setup, programs, policy, entries, stage))
        else:
            from t1jax.pipeline.play import playing  # the engine takes seconds to import

            async def play() -> None:
                async with playing(setup, "critic", policy) as (collect, publish, tasks):
                    await publish(policy, 0)
                    await warm_up(setup, programs, policy, entries, stage, collect, tasks)

            asyncio.run(play())
    print(f"the critic is saved in {setup.folder / 'checkpoints' / 'critic'}")


async def warm_up(
    setup: Setup,
    programs: Programs,
    policy: Params,
    entries: Sequence[Entry],
    stage: Session,
    collect: Collect | None = None,
    tasks: Tasks = lambda number: (),
) -> steps.Learner:
    """Trains from the last saved state; the critic's learner after the last step.

    Args:
      setup: the models.
      programs: see `make_programs`.
      policy: its parameters, which the critic's body copies and nothing changes.
      entries: recorded trajectories, or none.
      stage: the open session.
      collect: plays the rollouts, by weights of version 0.
      tasks: of each rollout.
    """
    section = require(setup.config, "critic")
    loop = Loop(setup, programs, policy, section)
    found = stage.restore({"critic": abstract_critic(setup, programs.optimizer)})
    read, _ = count_steps(section, entries)
    start = 0
    if found is not None:
        loop.learner, start = found.trees["critic"], found.step
    stage.begin(start)
    for number, prepared, facts in _recorded(setup, section, entries, start, read):
        await asyncio.to_thread(loop.step, number, prepared, facts, stage)
    for number in range(max(start, read), stage.total):
        assert collect is not None
        launched = tasks(number - read)
        work = collect(number - read, 0, launched, wanted=section.batch_trajectories)
        try:
            rollout = await stage.stop.unless(work)
        except Stopped:
            if loop.learner is not None:
                stage.save(number, {"critic": loop.learner}, {})
            raise stage.preempted(number) from None
        _, prepared = loop.feed.of(named(rollout))
        await asyncio.to_thread(loop.step, number, prepared, measured(rollout), stage)
    assert loop.learner is not None
    return loop.learner


def _recorded(
    setup: Setup, section: CriticSection, entries: Sequence[Entry], start: int, read: int
) -> Iterator[tuple[int, Prepared, dict[str, float]]]:
    """Batches of recorded trajectories from step `start` on, with the mean of their rewards."""
    if start >= read:
        return
    chosen = epochs(
        entries,
        batch_trajectories=section.batch_trajectories,
        count=section.epochs,
        seed=setup.config.seed,
    )
    feed = make_feed(setup, section.batch, routed=False)
    batches = reader(chosen, feed, start, workers=section.batch.workers)
    for number, prepared in enumerate(batches, start):
        rewards = [entry.reward for entry in chosen[number]]
        yield number, prepared, {"reward/mean": float(np.mean(rewards))}


class Loop:
    """The critic's steps. `learner` is None before the first batch: its mean reward is needed."""

    def __init__(self, setup: Setup, programs: Programs, policy: Params, section: CriticSection):
        self._setup, self._programs, self._policy = setup, programs, policy
        self._placer = Placer(setup.run, section.batch.rows)
        self._clock = Clock()
        ppo = setup.config.ppo
        self._factors = (1.0, 1.0) if ppo is None else (ppo.gamma, ppo.lam)
        self._tokens = section.batch.tokens
        self.feed = make_feed(setup, section.batch, routed=False)
        self.learner: steps.Learner | None = None

    def step(
        self, number: int, prepared: Prepared, facts: dict[str, float], stage: Session
    ) -> None:
        """One update on a batch, told and saved."""
        if self.learner is None:
            self.learner = new_critic(
                self._setup, self._programs.optimizer, self._policy, facts["reward/mean"]
            )
        with jax.transfer_guard("disallow"):
            self.learner, row = self._update(self.learner, prepared)
        row |= facts | prepared.facts | {"seconds": self._clock.lap()}
        skipped = bool(row.pop("skipped"))
        stage.told(number, row, skipped=skipped, dump=functools.partial(dump, prepared))
        stage.done(number + 1, {"critic": self.learner}, {}, row["explained_variance"])

    def _update(
        self, learner: steps.Learner, prepared: Prepared
    ) -> tuple[steps.Learner, dict[str, Any]]:
        ((_, batches),) = read_ahead(iter([prepared]), self._placer, self._tokens)
        rewards = [self._placer.numbers(packed.rewards_BT) for packed in prepared.packed]
        values = [self._programs.values(learner.params, batch) for batch in batches]
        gamma, lam = self._factors
        returns = [
            measure.estimate(b, r, v, gamma, lam)[1]
            for b, r, v in zip(batches, rewards, values, strict=True)
        ]
        quality = measure.explained(values, returns, [b.mask_BT for b in batches])
        inputs = [CriticInputs(*each) for each in zip(batches, values, returns, strict=True)]
        learner, told = self._programs.step(learner, inputs)
        told["value_loss"] = told.pop("loss")
        return learner, {n: float(x) for n, x in fetched({**quality, **told}).items()}

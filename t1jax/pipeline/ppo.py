"""`t1jax ppo`: rollouts and updates in turns, or (staleness 1) at the same time.

One step: the rollout -> values and log-probs under its weights -> advantages -> critic update ->
actor update -> publish. Weights of version v have made v steps. At staleness 0 step t trains on
episodes of version t. At staleness 1 the rollout of step t + 1 runs on version t while step t
trains; new weights are published only between rollouts, so an episode has one version throughout.

A saved state holds the learners, and at staleness 1 the published weights too: the rollout that was
in flight is then taken up again by the same weights, from the trials it had finished.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from sandbox.task import Task
from t1jax.checkpoint.publish import make_publisher
from t1jax.checkpoint.train_state import Restored, TrainStates
from t1jax.config import Config, PpoSection, require
from t1jax.errors import UserError
from t1jax.model.qwen3_5 import Params, abstract_params
from t1jax.pipeline.collect import Collect, Publish, Rollout
from t1jax.pipeline.episodes import measured
from t1jax.pipeline.feed import dump
from t1jax.pipeline.learning import (
    Setup,
    abstract_critic,
    abstract_policy,
    copied,
    keep_config,
    load_policy,
    new_critic,
    open_setup,
    open_states,
    policy_path,
    save_policy,
)
from t1jax.pipeline.profile import Clock, profiled
from t1jax.pipeline.session import Session, session
from t1jax.pipeline.stop import Stopped, cancel
from t1jax.pipeline.update import Learners, Programs, Updater, make_programs
from t1jax.rl import steps

SHOWN = (
    "reward/mean", "success", "explained_variance", "approximate_kl",
    "mismatch/train_rollout_logprob_abs_diff", "tokens_per_s",
)  # fmt: skip
Tasks = Callable[[int], Sequence[Task]]


@dataclasses.dataclass(kw_only=True)
class Published:
    """What the engine serves."""

    params: Params
    version: int


def ppo(config: Config, *, profile: str = "") -> None:
    """`t1jax ppo`.

    Raises:
      UserError: a rollout that cannot be trained on, or a guard stopped the run.
      Preempted: a signal came; the state is saved.
    """
    section = require(config, "ppo")
    from t1jax.pipeline.play import playing  # the engine takes seconds to import

    setup = open_setup(config)
    keep_config(config)
    programs = make_programs(setup, section)
    policy = load_policy(setup, policy_path(config, "ppo"))

    async def play() -> Params:
        with session(setup, "ppo", total=section.steps, shown=SHOWN) as stage:
            async with playing(setup, "ppo", policy) as seam:
                return await train(setup, programs, stage, policy, *seam, profile=profile)

    params = asyncio.run(play())
    print(f"wrote {save_policy(setup, params, 'ppo', section.steps)}")


async def train(
    setup: Setup,
    programs: Programs,
    stage: Session,
    policy: Params,
    collect: Collect,
    publish: Publish,
    tasks: Tasks,
    *,
    profile: str = "",
) -> Params:
    """Trains from the last saved state; the policy's parameters after the last step.

    Args:
      setup: the models.
      programs: see `make_programs`.
      stage: the open session.
      policy: the stage's first weights. They belong to the training from here on: the actor begins
        as them, or they are freed where a saved state is taken up.
      collect: plays a step's trials.
      publish: gives weights to the engine.
      tasks: of each step.
      profile: a directory for a trace of one step; empty: none.
    """
    loop = Loop(setup, programs, stage, collect, publish, tasks)
    await loop.begin(policy)
    pending = loop.launch(loop.start)
    try:
        for step in range(loop.start, stage.total):
            rollout = await loop.finished(pending, step)
            behind = loop.published
            if loop.stale:  # the next rollout runs while this step trains
                await loop.publish_now(step)
                pending = loop.launch(step + 1)
            with profiled(profile if step == loop.start + 1 else ""):
                await asyncio.to_thread(loop.update, rollout, behind, step)
            if not loop.stale:
                await loop.publish_now(step + 1)
            loop.save_if_due(step + 1)
            if not loop.stale:
                pending = loop.launch(step + 1)
    finally:
        await cancel(pending)
    assert loop.learners is not None
    return loop.learners.actor.params


class Loop:
    """The state between PPO's steps, and the parts that `train` puts in order."""

    def __init__(
        self, setup: Setup, programs: Programs, stage: Session, collect: Collect,
        publish: Publish, tasks: Tasks,
    ):  # fmt: skip
        self._setup, self._programs, self._stage = setup, programs, stage
        self._collect, self._publish, self._tasks = collect, publish, tasks
        self._section: PpoSection = require(setup.config, "ppo")
        self.stale = self._section.staleness == 1
        self._updater = Updater(setup, programs, self._section)
        self._sampler = make_publisher(setup.policy, setup.run.mesh, setup.config.model.dtype)
        self._clock, self._score = Clock(), 0.0
        self.start = 0
        self.actor: steps.Learner | None = None
        self.learners: Learners | None = None
        self.published: Published | None = None

    # ---- beginning and saving ----

    async def begin(self, policy: Params) -> None:
        """Restores, or takes the stage's first weights; publishes what the rollout needs."""
        found = self._stage.restore(self._abstract())
        if found is None:
            reference = copied(policy) if self._has_reference else None
            actor = steps.new_learner(
                self._setup.policy, self._setup.run, self._programs.actor_optimizer, policy
            )
            critic = warmed_critic(self._setup, self._programs) if self._has_critic else None
            self.learners = Learners(actor=actor, critic=critic, reference=reference)
            await self.publish_now(0)
        else:
            await self._go_on(found, policy)
        self._stage.begin(self.start)

    async def _go_on(self, found: Restored, policy: Params) -> None:
        self.start = found.step
        self._updater.placer.rooms.update(found.facts["rooms"])
        actor, critic = found.trees["actor"], found.trees.get("critic")
        reference = policy if self._has_reference else None
        self.learners = Learners(actor=actor, critic=critic, reference=reference)
        params = found.trees.get("published")
        params = self._sampler(actor.params) if params is None else params
        self.published = Published(params=params, version=found.facts["version"])
        await self._publish(params, self.published.version)
        if reference is None:  # the engine has let go of them
            for leaf in jax.tree.leaves(policy):
                leaf.delete()

    @property
    def _has_critic(self) -> bool:
        return self._section.baseline == "critic"

    def _abstract(self) -> dict[str, Any]:
        trees: dict[str, Any] = {
            "actor": abstract_policy(self._setup, self._programs.actor_optimizer)
        }
        if self._has_critic:
            trees["critic"] = abstract_critic(self._setup, self._programs.critic_optimizer)
        if self.stale:
            dtype = self._setup.config.model.dtype
            trees["published"] = abstract_params(self._setup.policy, self._setup.run.mesh, dtype)
        return trees

    @property
    def _has_reference(self) -> bool:
        return self._section.kl > 0 or self._section.kl_reward > 0

    def _trees(self) -> dict[str, Any]:
        assert self.learners is not None and self.published is not None
        trees: dict[str, Any] = {"actor": self.learners.actor}
        if self.learners.critic is not None:
            trees["critic"] = self.learners.critic
        if self.stale:
            trees["published"] = self.published.params
        return trees

    def _facts(self) -> dict[str, Any]:
        assert self.published is not None
        return {"version": self.published.version, "rooms": self._updater.placer.rooms}

    def save_if_due(self, step: int) -> None:
        """After `step` steps. Raises Preempted where a signal came."""
        if self.learners is not None and (not self._has_critic or self.learners.critic):
            self._stage.done(step, self._trees(), self._facts(), self._score)

    def _save(self, step: int) -> None:
        if self.learners is not None and (not self._has_critic or self.learners.critic):
            self._stage.save(step, self._trees(), self._facts())

    # ---- rollouts ----

    def launch(self, step: int) -> "asyncio.Task[Rollout]":
        """Starts a step's rollout; beyond the last step: nothing, and nobody waits for it."""

        async def collect() -> Rollout:
            if step >= self._stage.total:
                return Rollout(trajectories=(), counts={})
            assert self.published is not None
            wanted = self._section.batch_trajectories
            return await self._collect(
                step, self.published.version, self._tasks(step), wanted=wanted
            )

        return asyncio.create_task(collect())

    async def finished(self, pending: "asyncio.Task[Rollout]", step: int) -> Rollout:
        """The step's rollout. Whatever ends it early, the state before it is saved first."""
        self._stage.watchdog.beat(f"ppo, rollout {step}")
        with self._clock.part("rollout"):
            try:
                rollout = await self._stage.stop.unless(pending)
            except Stopped:
                self._save(step)
                raise self._stage.preempted(step) from None
            except UserError:
                self._save(step)
                raise
        if not rollout.trajectories:
            self._save(step)
        self._stage.watchdog.beat(f"ppo, update {step}")
        return rollout

    async def publish_now(self, version: int) -> None:
        """Gives the actor's weights to the engine, unless it has them."""
        assert self.learners is not None
        if self.published is not None and self.published.version == version:
            return
        with self._clock.part("publish"):
            params = self._sampler(self.learners.actor.params)
            self.published = Published(params=params, version=version)
            await self._publish(params, version)

    # ---- updates ----

    def update(self, rollout: Rollout, behind: Published | None, step: int) -> None:
        """One step of the learners, told. Runs in a thread beside the next rollout."""
        assert self.learners is not None and behind is not None
        learners = self.learners
        if self._has_critic and learners.critic is None and rollout.trajectories:
            mean = measured(rollout)["reward/mean"]
            learners.critic = new_critic(
                self._setup, self._programs.critic_optimizer, learners.actor.params, mean
            )
        stale = behind.params if self.stale else None
        row = self._updater(learners, rollout, stale, behind.version, step)
        parts = dict(self._clock.parts)
        seconds = self._clock.lap()
        row |= {f"seconds/{name}": value for name, value in parts.items()}
        row |= {"seconds": seconds, "tokens_per_s": row["tokens/total"] / seconds}
        row |= {"version": behind.version, "staleness": step - behind.version}
        self._score = row["reward/mean"]
        skipped = max(row.pop("actor/skipped"), row.pop("critic/skipped", 0.0)) > 0
        prepared = self._updater.prepared
        self._stage.told(step, row, skipped=skipped, dump=functools.partial(_dump, prepared))


def _dump(prepared: Sequence[Any], folder: Path) -> None:
    for number, part in enumerate(prepared):
        (folder / f"minibatch-{number}").mkdir(exist_ok=True)
        dump(part, folder / f"minibatch-{number}")


def warmed_critic(setup: Setup, programs: Programs) -> steps.Learner | None:
    """The critic that `t1jax critic` left; None: it starts from the first rollout.

    Raises:
      UserError: ppo.warm_critic names a run without one.
    """
    named = require(setup.config, "ppo").warm_critic
    config = setup.config.model_copy(update={"run": named or setup.config.run})
    if not (Path(config.run) / "checkpoints" / "critic").is_dir():
        if named:
            raise UserError(
                f"ppo.warm_critic={named!r} holds no checkpoints/critic; expected the folder of a "
                "run in which `t1jax critic` has ended"
            )
        return None
    states: TrainStates
    with open_states(config, "critic") as states:
        found = states.restore({"critic": abstract_critic(setup, programs.critic_optimizer)})
    return None if found is None else copied(found.trees["critic"])

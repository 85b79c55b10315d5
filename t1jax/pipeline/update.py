"""One PPO step on the devices: from a rollout to updated learners and numbers.

    values -> advantages -> critic update -> old log-probs -> actor update

Owns which arrays are where when: with `offload` what a phase does not use lies in host memory, the
optimizers' states between steps too. Knows nothing of engines, files or signals.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from t1jax.config import PpoSection
from t1jax.data.pipeline import Prepared
from t1jax.model.qwen3_5 import Params
from t1jax.pipeline import measure
from t1jax.pipeline.collect import Rollout
from t1jax.pipeline.episodes import (
    against_group,
    check,
    encoded_again,
    measured,
    normalised,
    split,
)
from t1jax.pipeline.feed import make_feed, read_ahead
from t1jax.pipeline.learning import Setup, make_optimizer
from t1jax.pipeline.place import HOST, Placer, fetched, moved
from t1jax.pipeline.profile import Clock
from t1jax.rl import steps
from t1jax.rl.inputs import ActorInputs, Batch, CriticInputs, Routes
from t1jax.rl.optimizer import Optimizer
from t1jax.trajectory.chat import Chat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What PPO runs on the devices; each shape is compiled once."""

    actor_optimizer: Optimizer
    critic_optimizer: Optimizer
    logprobs: Callable[[Params, Batch, Routes | None], steps.Scored]
    values: Callable[[Params, Batch], jax.Array]
    actor_step: steps.Step[ActorInputs]
    critic_step: steps.Step[CriticInputs]


def make_programs(setup: Setup, section: PpoSection) -> Programs:
    """Programs of the whole run."""
    total = section.steps * section.minibatches
    actor, critic = (make_optimizer(o, total) for o in (section.actor, section.critic))
    run = setup.run
    return Programs(
        actor_optimizer=actor,
        critic_optimizer=critic,
        logprobs=steps.make_policy_logprobs(setup.policy, run),
        values=steps.make_critic_values(setup.critic, run),
        actor_step=steps.make_actor_step(
            setup.policy, run, actor, clip=section.clip, kl=section.kl, entropy=section.entropy
        ),
        critic_step=steps.make_critic_step(setup.critic, run, critic, clip=section.value_clip),
    )


@dataclasses.dataclass(kw_only=True)
class Learners:
    """Both models in training; each step replaces them."""

    actor: steps.Learner
    critic: steps.Learner | None  # None: the baseline is the group
    reference: Params | None  # the policy that PPO began with, where a KL term needs it


@dataclasses.dataclass(kw_only=True)
class Micro:
    """What is known of one micro-batch, as it becomes known."""

    batch: Batch
    routes: Routes | None
    rewards_BT: jax.Array
    sampler_BT: jax.Array
    values_BT: jax.Array
    scored: steps.Scored
    reference_BT: jax.Array | None = None
    advantages_BT: jax.Array | None = None
    returns_BT: jax.Array | None = None


def _masks(micros: Sequence[Micro]) -> list[jax.Array]:
    return [micro.batch.mask_BT for micro in micros]


def over_minibatches(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of a step's minibatches as the step's: one that was skipped counts, counts add up,
    the rest is averaged."""

    def joined(name: str) -> float:
        numbers = [float(row[name]) for row in rows]
        if name == "skipped":
            return max(numbers)
        whole = sum(numbers)
        return whole if name == "tokens" or name.startswith("chunks_") else whole / len(rows)

    return {name: joined(name) for name in rows[0]}


class Updater:
    """Makes PPO's steps. Its `placer` remembers shapes, and belongs to the run's state."""

    def __init__(self, setup: Setup, programs: Programs, section: PpoSection):
        self._setup, self._programs, self._section = setup, programs, section
        self.placer = Placer(setup.run, section.batch.rows)
        self._feed = make_feed(setup, section.batch, routed=section.replay)
        self.prepared: list[Prepared] = []  # of the last step, for a dump
        self._chat: Chat | None = None
        if section.tokens == "retokenised":
            self._chat = Chat.load(setup.config.model.checkpoint)

    def __call__(
        self, learners: Learners, rollout: Rollout, behind: Params | None, version: int, step: int
    ) -> dict[str, Any]:
        """One step; replaces the learners. Blocks until it is done.

        Args:
          learners: what is trained.
          rollout: of this step.
          behind: the rollout's weights, where the actor has moved on since (staleness 1).
          version: of those weights.
          step: its number.
        """
        section, clock = self._section, Clock()
        check(rollout, version=version, replay=section.replay, on_missing=section.on_missing)
        row = measured(rollout)
        if self._chat is not None:
            rollout, shares = encoded_again(rollout, self._chat)
            row |= shares
        with clock.part("pack"):
            parts = split(self._shaped(rollout), section.minibatches, self._setup.config.seed, step)
            self.prepared = [self._feed.of(part)[1] for part in parts]
        with jax.transfer_guard("disallow"):
            with clock.part("values_and_logprobs"):
                self._make_room(learners, {"actor": ("params",), "critic": ("params",)})
                minibatches = [self._score(learners, behind, p) for p in self.prepared]
                whole = [micro for part in minibatches for micro in part]
                self._estimate(whole)
                told = self._measured(whole)
            with clock.part("critic"):
                self._make_room(learners, {"critic": ("params", "state")})
                told |= self._train_critic(learners, minibatches)
            with clock.part("actor"):
                self._make_room(learners, {"actor": ("params", "state")})
                told |= self._train_actor(learners, minibatches, behind)
                self._make_room(learners, {"actor": ("params",)})
        row |= self._flat(told) | over_minibatches([x.facts for x in self.prepared])
        return row | {f"seconds/{name}": seconds for name, seconds in clock.parts.items()}

    def _make_room(self, learners: Learners, used: Mapping[str, Sequence[str]]) -> None:
        """With `offload`: on the devices are the parts that the next phase uses, and no others."""
        if not self._section.offload:
            return
        for name in sorted(("critic", "actor"), key=lambda name: len(used.get(name, ()))):
            learner = getattr(learners, name)
            if learner is not None:
                there = {
                    part: moved(getattr(learner, part), "device" if wanted else HOST)
                    for part in ("params", "state")
                    for wanted in [part in used.get(name, ())]
                }
                setattr(learners, name, learner._replace(**there))

    def _shaped(self, rollout: Rollout) -> Rollout:
        if self._section.baseline == "group":
            return against_group(rollout)
        return normalised(rollout) if self._section.normalize_rewards else rollout

    def _score(self, learners: Learners, behind: Params | None, prepared: Prepared) -> list[Micro]:
        """Values, and log-probs under the rollout's weights with its routes."""
        ((_, batches),) = read_ahead(iter([prepared]), self.placer, self._section.batch.tokens)
        weights = learners.actor.params if behind is None else behind
        experts, micros = self._setup.policy.config.moe.experts, []
        for batch, packed in zip(batches, prepared.packed, strict=True):
            routes = self.placer.routes(packed, experts) if self._section.replay else None
            rewards_BT = self.placer.numbers(packed.rewards_BT)
            values_BT = self.placer.numbers(0 * packed.rewards_BT)
            if learners.critic is not None:
                values_BT = self._programs.values(learners.critic.params, batch)
            reference_BT = None
            if learners.reference is not None:
                reference_BT = self._programs.logprobs(learners.reference, batch, None).logprobs_BT
            micros.append(
                Micro(
                    batch=batch,
                    routes=routes,
                    rewards_BT=rewards_BT,
                    sampler_BT=self.placer.numbers(packed.sampler_logprobs_BT),
                    values_BT=values_BT,
                    scored=self._programs.logprobs(weights, batch, routes),
                    reference_BT=reference_BT,
                )
            )
        return micros

    def _estimate(self, micros: Sequence[Micro]) -> None:
        section = self._section
        group = section.baseline == "group"
        gamma, lam = (1.0, 1.0) if group else (section.gamma, section.lam)
        for micro in micros:
            rewards_BT = micro.rewards_BT
            if section.kl_reward > 0:
                rewards_BT = measure.penalised(
                    rewards_BT, micro.scored.logprobs_BT, micro.reference_BT,
                    micro.batch.mask_BT, jax.device_put(section.kl_reward),
                )  # fmt: skip
            micro.advantages_BT, micro.returns_BT = measure.estimate(
                micro.batch, rewards_BT, micro.values_BT, gamma, lam
            )
        if section.normalize_advantages:
            white = measure.whitened([m.advantages_BT for m in micros], _masks(micros))
            for micro, advantages_BT in zip(micros, white, strict=True):
                micro.advantages_BT = advantages_BT

    def _measured(self, micros: Sequence[Micro]) -> dict[str, Any]:
        masks = _masks(micros)
        old = [micro.scored.logprobs_BT for micro in micros]
        gap = measure.gap(old, [micro.sampler_BT for micro in micros], masks)
        told = {f"mismatch/{name}": value for name, value in gap.items()}
        if self._section.baseline == "critic":
            values, returns = [m.values_BT for m in micros], [m.returns_BT for m in micros]
            told |= measure.explained(values, returns, masks)
        counts = fetched([m.scored[1:] for m in micros])
        replaced, recorded, load = (sum(each) for each in zip(*counts, strict=True))
        told["load"] = measure.imbalance(jax.device_put(load))
        told["replaced"] = replaced / recorded.clip(1)
        return told

    def _train_critic(
        self, learners: Learners, minibatches: Sequence[Sequence[Micro]]
    ) -> dict[str, Any]:
        if learners.critic is None:
            return {}
        updates = []
        for micros in minibatches:
            inputs = [CriticInputs(m.batch, m.values_BT, m.returns_BT) for m in micros]  # type: ignore[arg-type]
            learners.critic, metrics = self._programs.critic_step(learners.critic, inputs)
            updates.append(metrics)
        told = over_minibatches(fetched(updates))  # waits: the seconds are this phase's
        told["value_loss"] = told.pop("loss")
        return {n if n == "value_loss" else f"critic/{n}": x for n, x in told.items()}

    def _train_actor(
        self, learners: Learners, minibatches: Sequence[Sequence[Micro]], behind: Params | None
    ) -> dict[str, Any]:
        # At staleness 0 and one update the ratio's denominator is the pass's own: exactly 1.
        own = behind is None and len(minibatches) == 1
        updates = []
        for micros in minibatches:
            inputs = [self._actor_inputs(micro, own) for micro in micros]
            learners.actor, metrics = self._programs.actor_step(learners.actor, inputs)
            updates.append(metrics)
        told = over_minibatches(fetched(updates))
        renamed = {"gradient_norm", "update_norm", "loss", "skipped"}
        return {f"actor/{n}" if n in renamed else n: x for n, x in told.items()}

    def _actor_inputs(self, micro: Micro, own: bool) -> ActorInputs:
        section, old_BT = self._section, micro.scored.logprobs_BT
        weights_BT = None
        if section.importance != "none":
            weights_BT = measure.importance(
                old_BT, micro.sampler_BT, micro.batch.mask_BT,
                section.importance, section.importance_cap,
            )  # fmt: skip
        assert micro.advantages_BT is not None
        return ActorInputs(
            micro.batch,
            micro.routes,
            None if own else old_BT,
            micro.advantages_BT,
            weights_BT,
            micro.reference_BT,
        )

    def _flat(self, told: dict[str, Any]) -> dict[str, Any]:
        """Numbers on the host: lists by layer beside their means."""
        told = fetched(told)
        load, replaced = told.pop("load"), told.pop("replaced")
        row: dict[str, Any] = {name: float(value) for name, value in told.items()}
        row |= {"expert_load": float(load.mean()), "expert_load_by_layer": load.tolist()}
        if self._section.replay:
            row["replay_replace_rate"] = float(replaced.mean())
            row["replay_replace_rate_by_layer"] = replaced.tolist()
            known = sum(p.recorded_BT.sum() for x in self.prepared for p in x.packed)
            inputs = sum((p.segments_BT > 0).sum() for x in self.prepared for p in x.packed)
            last = sum((p.positions_BT == 0)[p.segments_BT > 0].sum()
                       for x in self.prepared for p in x.packed)  # fmt: skip
            row["routes_missing"] = float(inputs - last - known)
        return row

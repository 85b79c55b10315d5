"""What a rollout's trajectories say on the host: rewards, lengths, outcomes, and whether they fit.

No arrays of devices here. The checks refuse what a step must not train on, naming the trajectory.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from t1jax.errors import UserError
from t1jax.pipeline.collect import Rollout
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import Chunk, Trajectory
from t1jax.trajectory.retokenise import retokenise

Z95 = 1.96


def named(rollout: Rollout) -> list[tuple[str, Trajectory]]:
    """Each trajectory with a name for messages."""
    return [
        (f"{number} of task {trajectory.ending.task}", trajectory)
        for number, trajectory in enumerate(rollout.trajectories)
    ]


def check(rollout: Rollout, *, version: int, replay: bool, on_missing: str) -> None:
    """Refuses a rollout that a step cannot train on.

    Args:
      rollout: of a step.
      version: of the weights that were to play it.
      replay: whether routes will be replayed.
      on_missing: `error`, or `live` where a route is missing.

    Raises:
      UserError: nothing was graded, another version sampled a token, log-probs are of another
        distribution than the trainer's, or routes are missing.
    """
    if not rollout.trajectories:
        told = ", ".join(f"{name} {number:g}" for name, number in rollout.counts.items())
        raise UserError(
            f"the rollout of weights {version} has no graded trajectory ({told or 'no counts'}); "
            "the state before it is saved. Look at the trials' errors, then run it again"
        )
    for name, trajectory in named(rollout):
        for chunk in trajectory.chunks:
            check_sampled(name, chunk, version)
            if replay and on_missing == "error" and chunk.missing_rows:
                raise UserError(
                    f"trajectory {name} lacks the routes of {chunk.missing_rows} of "
                    f"{len(chunk) - 1} tokens; have the sampler record them, or set "
                    "ppo.on_missing=live to let the live router choose there"
                )


def check_sampled(name: str, chunk: Chunk, version: int) -> None:
    """Refuses a chunk whose log-probs the trainer cannot compute again under one set of weights."""
    others = set(np.unique(chunk.versions[chunk.mask]).tolist()) - {version}
    if others:
        raise UserError(
            f"trajectory {name} was sampled by weights {sorted(others)}; expected {version} alone: "
            "the log-probs of others cannot be recomputed"
        )
    chunk.raw_logprobs()
    if chunk.sampling.temperature != 1.0:
        raise UserError(
            f"trajectory {name} was sampled at temperature {chunk.sampling.temperature}; the "
            "trainer's log-probs are those of temperature 1: set ppo.sampling.temperature=1.0"
        )


def measured(rollout: Rollout) -> dict[str, float]:
    """Rewards with a 95% interval, success, outcomes, turns, tokens, boundaries, other trials."""
    trajectories = rollout.trajectories
    rewards = np.array([t.reward for t in trajectories], np.float64)
    spread = Z95 * rewards.std(ddof=1) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    tokens = [sum(map(len, t.chunks)) for t in trajectories]
    outcomes = Counter(t.ending.outcome for t in trajectories)
    rules: Counter[str] = Counter()
    for trajectory in trajectories:
        rules.update(trajectory.boundaries)
    row = {
        "reward/mean": rewards.mean(),
        "reward/low": rewards.mean() - spread,
        "reward/high": rewards.mean() + spread,
        "success": outcomes["solved"] / len(trajectories),
        "trajectories": len(trajectories),
        "turns/mean": np.mean([t.turns for t in trajectories]),
        "tokens/mean": np.mean(tokens),
        "tokens/total": sum(tokens),
        "infra_failures": rollout.counts.get("infra_error", 0),
    }
    row |= {f"outcome/{name}": number for name, number in outcomes.items()}
    row |= {f"boundary/{n}": number / max(rules.total(), 1) for n, number in rules.items()}
    row |= {f"rollout/{name}": number for name, number in rollout.counts.items()}
    return {name: float(number) for name, number in row.items()}


def with_rewards(rollout: Rollout, rewards: Sequence[float]) -> Rollout:
    """The same trajectories, with other numbers to learn from."""
    changed = tuple(
        dataclasses.replace(t, ending=dataclasses.replace(t.ending, reward=float(reward)))
        for t, reward in zip(rollout.trajectories, rewards, strict=True)
    )
    return dataclasses.replace(rollout, trajectories=changed)


def encoded_again(rollout: Rollout, chat: Chat) -> tuple[Rollout, dict[str, float]]:
    """The trajectories with their text encoded again, and the share of sampled tokens that changed.

    The ablation of token-in-token-out: what was sampled is trained on under other ids.
    """
    changed = lost = sampled = 0

    def again(trajectory: Trajectory) -> Trajectory:
        nonlocal changed, lost, sampled
        chunks = [retokenise(chunk, chat) for chunk in trajectory.chunks]
        changed += sum(new.changed for new in chunks)
        lost += sum(new.lost for new in chunks)
        sampled += sum(chunk.sampled_tokens for chunk in trajectory.chunks)
        return dataclasses.replace(trajectory, chunks=tuple(new.chunk for new in chunks))

    new = dataclasses.replace(rollout, trajectories=tuple(map(again, rollout.trajectories)))
    shares = {"changed": changed, "lost": lost}
    return new, {f"retokenised/{name}": n / max(sampled, 1) for name, n in shares.items()}


def against_group(rollout: Rollout) -> Rollout:
    """Rewards less the mean of the attempts at the same task, over their spread (DeepSeekMath,
    arXiv 2402.03300, eq. 4); 0 where all attempts earned the same.

    As the reward of an episode without a critic (values 0, gamma and lambda 1) this is the
    advantage of each of its tokens.
    """
    by_task: Mapping[str, list[int]] = defaultdict(list)
    for number, trajectory in enumerate(rollout.trajectories):
        by_task[trajectory.ending.task].append(number)
    rewards = np.array([t.reward for t in rollout.trajectories], np.float64)
    relative = np.zeros_like(rewards)
    for members in by_task.values():
        relative[members] = _standard(rewards[members])
    return with_rewards(rollout, relative.tolist())


def normalised(rollout: Rollout) -> Rollout:
    """Rewards with mean 0 and variance 1 over the step's trajectories."""
    rewards = np.array([t.reward for t in rollout.trajectories], np.float64)
    return with_rewards(rollout, _standard(rewards).tolist())


def _standard(rewards: np.ndarray) -> np.ndarray:
    spread = rewards.std()
    centred = rewards - rewards.mean()
    return centred / spread if spread > 1e-6 * max(abs(rewards.mean()), 1e-6) else 0 * centred


def split(rollout: Rollout, parts: int, seed: int, step: int) -> list[list[tuple[str, Trajectory]]]:
    """Trajectories in so many minibatches, drawn by seed and step; one part keeps the order.

    Raises:
      UserError: there are fewer trajectories than parts.
    """
    whole = named(rollout)
    if len(whole) < parts:
        raise UserError(
            f"step {step} has {len(whole)} graded trajectories for ppo.minibatches={parts}; "
            "expected one each at least"
        )
    if parts == 1:
        return [whole]
    order = np.random.default_rng((seed, step)).permutation(len(whole))
    return [[whole[i] for i in sorted(share)] for share in np.array_split(order, parts)]

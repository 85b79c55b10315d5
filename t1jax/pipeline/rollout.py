"""Rollouts: many agents, one policy, many sandboxes; tasks in, trajectories out.

`Rollouts` is the `Collect` of training: a directory a step, more trials started than wanted, the
first to finish kept, in the order of the tasks. `rollout` is the command. What is on disk already
is taken, so a run that was ended goes on where it was. Knows nothing of models: a policy is given.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sandbox import task as task_format
from sandbox.base import Backend
from sandbox.commands import run_until_done
from sandbox.task import Task
from sandbox.trial import TrialConfig
from sandbox.verify import Baseline
from t1jax.agent.conversation import Policy
from t1jax.agent.episode import TRAJECTORY, Episode, EpisodeConfig, run_episode
from t1jax.agent.scripted import Scripted, solution_turns
from t1jax.config import AgentSection, Config, SamplingSection, SandboxSection, require
from t1jax.data.tasks import task_folders
from t1jax.errors import Preempted, UserError
from t1jax.pipeline.collect import Rollout
from t1jax.pipeline.policy import identity, open_policy, player
from t1jax.pipeline.trials import (
    Job,
    Play,
    Played,
    count,
    keep_settings,
    make_jobs,
    play_all,
    write_json,
)
from t1jax.pipeline.watch import Watch
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.completion import Completion, Request
from t1jax.trajectory.io import load_trajectory
from t1jax.trajectory.record import Sampling

CHOSEN = "rollout.json"  # of a step's directory: which trials were kept, written when all have
PolicyOf = Callable[[Task], Policy]
Result = TypeVar("Result")


def token_play(
    policy_of: PolicyOf,
    limits: AgentSection,
    sandbox: SandboxSection,
    sampling: SamplingSection,
    *,
    reward: str,
    baselines: Mapping[Path, Baseline],
) -> Play:
    """Episodes of policies over tokens."""

    async def play(job: Job, backend: Backend, folder: Path, watch: Watch) -> Episode:
        config = episode_config(job, folder, limits, sandbox, sampling, reward=reward)
        policy = _counted(policy_of(job.task), watch)
        baseline = baselines.get(job.task.root)
        return await run_episode(job.task, backend, policy, folder, config, baseline=baseline)

    return play


def episode_config(
    job: Job,
    folder: Path,
    limits: AgentSection,
    sandbox: SandboxSection,
    sampling: SamplingSection,
    *,
    reward: str,
) -> EpisodeConfig:
    """How a job is played; what tells it apart goes into its record."""
    return EpisodeConfig(
        limits=limits,
        trial=TrialConfig(verification=sandbox.verification, attempts=sandbox.attempts),
        sampling=Sampling(**sampling.model_dump(), seed=job.seed),
        reward=reward,
        session=f"{folder.parent.name}/{job.name}",
        details={
            "attempt": job.attempt,
            "seed": job.seed,
            "version": job.version,
            "category": job.label("category"),
            "difficulty": job.label("difficulty"),
        },
    )


def _counted(policy: Policy, watch: Watch) -> Policy:
    async def complete(request: Request) -> Completion:
        answer = await policy.complete(request)
        watch.sampled(len(answer.ids))
        return answer

    return Policy(complete=complete, chat=policy.chat, shape=policy.shape)


class Rollouts:
    """Plays the trials of training's steps: a `Collect`."""

    def __init__(self, folder: Path, play: Play, sandbox: SandboxSection, *, seed: int):
        self._folder, self._play, self._sandbox, self._seed = folder, play, sandbox, seed

    async def __call__(
        self, step: int, version: int, tasks: Sequence[Task], *, wanted: int
    ) -> Rollout:
        """See `Collect`."""
        if not 1 <= wanted <= len(tasks):
            raise UserError(
                f"step {step} wants {wanted} trajectories of {len(tasks)} trials; expected at "
                "least 1 and no more than are started"
            )
        folder = self._folder / f"step-{step:06d}"
        chosen = _read_chosen(folder, version)
        if chosen is None:
            chosen = await self._collect(folder, step, version, tasks, wanted)
        paths = [folder / name / TRAJECTORY for name in chosen["trials"]]
        trajectories = await asyncio.to_thread(lambda: tuple(map(load_trajectory, paths)))
        return Rollout(trajectories=trajectories, counts=chosen["counts"])

    async def _collect(
        self, folder: Path, step: int, version: int, tasks: Sequence[Task], wanted: int
    ) -> dict[str, Any]:
        jobs = make_jobs(tasks, seed=self._seed, step=step, version=version)
        with Watch(f"rollout {step}", len(jobs)) as watch:
            results = await play_all(jobs, self._play, folder, self._sandbox, watch, wanted=wanted)
            counts = count(jobs, results)
            counts |= {"seconds": watch.seconds, "tokens_per_s": watch.tokens_per_s}
        chosen = {"version": version, "trials": _graded(jobs, results), "counts": counts}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CHOSEN, chosen)
        return chosen


def _graded(jobs: Sequence[Job], results: Sequence[Played | None]) -> list[str]:
    return [
        job.name
        for job, played in zip(jobs, results, strict=True)
        if played is not None and played.graded
    ]


def _read_chosen(folder: Path, version: int) -> dict[str, Any] | None:
    """What an earlier run of this step chose, if it was played by the same weights."""
    file = folder / CHOSEN
    if not file.is_file():
        return None
    chosen: dict[str, Any] = json.loads(file.read_text())
    return chosen if chosen["version"] == version else None


# ---- tasks ---------------------------------------------------------------------------------------


def load_tasks(config: Config, split: str, limit: int = 0) -> list[Task]:
    """The tasks of a split or list of the config; with a limit a sample, which a higher one keeps.

    A sample, because lists are in the order of families or of quality.
    """
    section = require(config, "tasks")
    folders = list(task_folders(section.folder, getattr(section, split)))
    if limit:
        random.Random(config.seed).shuffle(folders)
        folders = folders[:limit]
    return [task_format.load(folder) for folder in folders]


def load_baselines(config: Config, split: str) -> dict[Path, Baseline]:
    """What an audit recorded of the tasks of a list; nothing where the config names a split."""
    section = require(config, "tasks")
    which = getattr(section, split)
    folders = task_folders(section.folder, which)
    file = next((f for f in (Path(section.folder) / which, Path(which)) if f.is_file()), None)
    if file is None:
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = zip(folders, map(json.loads, lines), strict=True)
    return {
        folder: Baseline.from_json(fields) for folder, fields in pairs if "oracle_passed" in fields
    }


# ---- the command ---------------------------------------------------------------------------------


def rollout(config: Config) -> None:
    """`t1jax rollout`: trials of a split's tasks, their trajectories below the run's folder.

    Raises:
      UserError: no trial was graded.
      Preempted: a signal ended it; the same command goes on.
    """
    asked = config.rollout
    folder = Path(config.run) / "trajectories" / asked.name
    tasks = load_tasks(config, asked.split, asked.limit)
    checkpoint = player(config, asked.checkpoint) if asked.policy == "model" else ""
    keep_settings(folder, _settings(config, checkpoint))
    jobs = make_jobs(tasks, seed=config.seed, step=0, attempts=asked.attempts)
    baselines = load_baselines(config, asked.split)

    async def play_with(policy_of: PolicyOf) -> list[Played | None]:
        play = token_play(
            policy_of,
            config.agent,
            config.sandbox,
            asked.sampling,
            reward=asked.reward,
            baselines=baselines,
        )
        with Watch("rollout", len(jobs)) as watch:
            return await play_all(jobs, play, folder, config.sandbox, watch)

    ended = Preempted(f"ended by a signal; {folder} keeps what is finished: run it again to go on")
    results = run_until_done(with_policy(config, checkpoint, play_with), ended)
    counts = count(jobs, results)
    shown = ", ".join(f"{int(number)} {name}" for name, number in counts.items())
    print(f"{folder}: {shown}")
    if not counts["graded"]:
        errors = [played.error for played in results if played is not None and played.error]
        raise UserError(f"no trial was graded; the first error: {errors[0] if errors else 'none'}")


def _settings(config: Config, checkpoint: str) -> dict[str, Any]:
    """What the trials of a folder have in common."""
    asked = config.rollout
    return {
        **identity(checkpoint),
        "policy": asked.policy,
        "split": asked.split,
        "seed": config.seed,
        "reward": asked.reward,
        "sampling": asked.sampling.model_dump(),
        "agent": config.agent.model_dump(),
    }


async def with_policy(
    config: Config, checkpoint: str, use: Callable[[PolicyOf], Awaitable[Result]]
) -> Result:
    """Calls `use` with who plays: a checkpoint; where none is named, each task's own solution."""
    if not checkpoint:
        chat = Chat.load(config.model.checkpoint)
        return await use(lambda task: _solver(chat, task, config.agent))
    async with open_policy(config, checkpoint) as policy:
        return await use(lambda task: policy)


def _solver(chat: Chat, task: Task, limits: AgentSection) -> Policy:
    script = Scripted(chat, solution_turns(task), thinking=limits.thinking)
    return Policy(complete=script, chat=chat)

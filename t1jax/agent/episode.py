"""One episode: instruction, turns, tool calls, until the policy submits or a limit is met.

`converse` is the loop, the same for every kind of policy. `TokenAgent` makes it an agent of
sandbox.trial whose every token is on disk as it comes; `run_episode` is a whole trial, with its
outcome and reward in the trajectory's ending. Cancelling is allowed at any await. Limits of time
are the trial's. Knows nothing of who else runs.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sandbox.base import Backend
from sandbox.task import Task
from sandbox.trial import OnStage, TrialConfig, TrialResult, run_trial
from sandbox.verify import UNGRADED, Baseline, Outcome, Verdict
from t1jax.agent.conversation import Policy, TokenConversation
from t1jax.agent.tools import Reply, Said, Terminal, Tools
from t1jax.config import AgentSection
from t1jax.errors import UserError
from t1jax.trajectory.completion import ContextFullError
from t1jax.trajectory.io import INCOMPLETE, Writer
from t1jax.trajectory.record import Ending, Sampling, Trajectory

TRAJECTORY = "trajectory"  # below a trial's directory
REWARDS = ("assertions", "fraction", "fraction_bonus", "binary", "gained")
PLAIN = Sampling()


class Conversation(Protocol):
    """A policy that is told what happened and says what to do."""

    async def open(self, instruction: str) -> Said:
        """The first turn. Raises ContextFullError, as the next does, where no room is left."""

    async def go_on(self, replies: Sequence[Reply]) -> Said:
        """The turn after these replies."""


async def converse(
    conversation: Conversation, instruction: str, tools: Tools, turns: int
) -> Outcome | None:
    """Plays one episode; an outcome only where it was cut short."""
    try:
        said = await conversation.open(instruction)
        for turn in range(1, turns + 1):
            replies = await tools.answer(said)
            if tools.counts.submitted:
                return None
            if turn < turns:
                said = await conversation.go_on(replies)
    except ContextFullError:
        return Outcome.context_full
    return Outcome.turns_exhausted


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """How one episode is run. `details` goes into the record as it is."""

    limits: AgentSection
    trial: TrialConfig
    sampling: Sampling = PLAIN
    reward: str = "fraction"  # the number in the ending; all that can be made are in its details
    session: str = ""  # the engine keeps a session's cache between turns
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise UserError(f"reward is {self.reward!r}; expected one of {', '.join(REWARDS)}")

    @property
    def limited_trial(self) -> TrialConfig:
        """The trial's settings with the agent's own limit of time."""
        limit_s = min(self.trial.agent_timeout_s, self.limits.seconds)
        return dataclasses.replace(self.trial, agent_timeout_s=limit_s)


class TokenAgent:
    """A policy over tokens, as an agent of a trial. What it wrote is finished by `finish`."""

    name = "model"

    def __init__(self, policy: Policy, folder: Path, config: EpisodeConfig):
        self._policy, self._config = policy, config
        self._path = folder / TRAJECTORY
        self._writer: Writer | None = None
        self._tools: Tools | None = None
        self._conversation: TokenConversation | None = None

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        """An attempt of the trial; what an earlier one wrote is dropped."""
        self.close()
        config = self._config
        self._writer = Writer(self._path, self._policy.shape, sampling=config.sampling)
        self._tools = Tools(terminal, config.limits)
        self._conversation = TokenConversation(
            self._policy,
            self._writer.recorder,
            config.limits,
            sampling=config.sampling,
            session=config.session,
        )
        return await converse(
            self._conversation, task.instruction, self._tools, config.limits.turns
        )

    def close(self) -> None:
        """Ends writing; what is written so far stays, incomplete."""
        if self._writer is not None:
            self._writer.__exit__()

    def finish(self, result: TrialResult) -> Trajectory | None:
        """The finished record; None where the trial did not come as far as a prompt."""
        if self._writer is None or self._tools is None or self._conversation is None:
            return None
        if len(self._writer.recorder) == 0:
            self.close()
            shutil.rmtree(self._path.with_name(self._path.name + INCOMPLETE))
            return None
        seconds = {**result.seconds, **self._conversation.seconds}
        details = {**_details(result), **vars(self._tools.counts), **self._config.details}
        ending = Ending(
            task=result.task,
            outcome=result.outcome.value,
            reward=reward_of(result.verdict, result.outcome, self._config.reward),
            timings={stage: round(spent, 4) for stage, spent in seconds.items()},
            details=details,
        )
        return self._writer.finish(ending)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What an episode took of the policy."""

    turns: int = 0
    tokens: int = 0  # of the whole stream
    sampled_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A trial's result, and the record where there is one: not where the policy was never asked,
    and not of policies that answer with text alone."""

    result: TrialResult
    usage: Usage
    trajectory: Trajectory | None = None


async def run_episode(
    task: Task,
    backend: Backend,
    policy: Policy,
    folder: Path,
    config: EpisodeConfig,
    *,
    baseline: Baseline | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Episode:
    """One trial of a task by a policy: its directory, with the trajectory below it."""
    agent = TokenAgent(policy, folder, config)
    with contextlib.closing(agent):
        result = await run_trial(
            task,
            agent,
            backend,
            folder,
            config=config.limited_trial,
            baseline=baseline,
            on_stage=on_stage,
        )
        trajectory = agent.finish(result)
    return Episode(result=result, usage=_usage(trajectory), trajectory=trajectory)


def _usage(trajectory: Trajectory | None) -> Usage:
    if trajectory is None:
        return Usage()
    return Usage(
        turns=trajectory.turns,
        tokens=sum(len(chunk) for chunk in trajectory.chunks),
        sampled_tokens=sum(chunk.sampled_tokens for chunk in trajectory.chunks),
    )


def reward_of(verdict: Verdict | None, outcome: Outcome, kind: str) -> float | None:
    """The reward of this kind; None where the trial was not graded.

    Raises:
      UserError: the kind needs what is not known of the task.
    """
    if verdict is None or outcome in UNGRADED or not verdict.graded:
        return None
    try:
        return verdict.reward(kind)
    except ValueError as error:
        raise UserError(f"reward {kind!r}: {error}") from None


def _details(result: TrialResult) -> dict[str, Any]:
    """What was passed, every reward that can be made of it, and what a person should know."""
    verdict = result.verdict
    details: dict[str, Any] = {"attempts": result.attempts, "error": result.error}
    if verdict is None or reward_of(verdict, result.outcome, "binary") is None:
        return details
    known = verdict.nop_passed is not None and verdict.total > verdict.nop_passed
    kinds = REWARDS if known else REWARDS[:-1]
    return details | {
        "passed": len(verdict.passed),
        "total": verdict.total,
        "nop_passed": verdict.nop_passed,
        "rewards": {kind: verdict.reward(kind) for kind in kinds},
        "flags": list(verdict.flags),
    }

"""Which of PPO's saved states is the run's result: the best on the validation split.

    RUN/weights/ppo-N               the policy after N steps, of each candidate
    RUN/evaluation/validation-N     how it played the validation split
    RUN/selection.json              the candidates' numbers, and which was chosen

The test split has no part in it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from t1jax.config import CheckpointSection, Config, require
from t1jax.errors import UserError
from t1jax.evaluation.run import evaluate
from t1jax.pipeline.learning import (
    Setup,
    abstract_policy,
    make_optimizer,
    open_setup,
    open_states,
    save_policy,
)
from t1jax.pipeline.trials import write_json

FILE = "selection.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A saved state and how its policy did."""

    steps: int
    checkpoint: str
    pass_at_1: float
    ci95: list[float] | None
    mean_fraction: float
    tasks: int
    attempts: int

    @property
    def rank(self) -> tuple[float, float, int]:
        """Higher is better: solved, then the fraction of assertions, then the later state."""
        return self.pass_at_1, self.mean_fraction, self.steps


def candidate_steps(total: int, checkpoints: CheckpointSection, count: int) -> list[int]:
    """The last `count` steps of a stage of `total` that are saved by schedule."""
    every = checkpoints.every_steps
    return sorted({*range(every, total + 1, every), total})[-count:]


def select(config: Config) -> None:
    """Evaluates the candidates and writes down which is the best.

    Raises:
      UserError: a candidate is not saved, or too many of its trials broke.
      Preempted: a signal ended it; the same command goes on.
    """
    section = require(config, "ppo")
    steps = candidate_steps(section.steps, config.checkpoints, config.selection.candidates)
    _write_policies(config, steps)
    candidates = [_evaluated(config, number) for number in steps]
    best = max(candidates, key=lambda candidate: candidate.rank)
    write_json(
        Path(config.run) / FILE,
        {
            "checkpoint": best.checkpoint,
            "steps": best.steps,
            "candidates": [dataclasses.asdict(candidate) for candidate in candidates],
        },
    )
    print(f"chosen: {best.checkpoint}, pass@1 {best.pass_at_1:.1%} on the validation split")


def selected(config: Config) -> str:
    """The chosen checkpoint.

    Raises:
      UserError: nothing was chosen yet.
    """
    file = Path(config.run) / FILE
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} does not say which checkpoint was chosen ({error}); `t1jax run` writes it "
            "after PPO"
        ) from None


def policy_of(config: Config, steps: int) -> Path:
    """Where a candidate's policy lies."""
    return Path(config.run) / "weights" / f"ppo-{steps}"


def validation_name(steps: int) -> str:
    """Of a candidate's evaluation."""
    return f"validation-{steps}"


def _write_policies(config: Config, steps: list[int]) -> None:
    missing = [n for n in steps if not (policy_of(config, n) / "manifest.json").exists()]
    if not missing:
        return
    setup = open_setup(config)
    section = require(config, "ppo")
    abstract = abstract_policy(setup, make_optimizer(section.actor, section.steps))
    with open_states(config, "ppo") as states:
        for number in missing:
            learner: Any = states.read(number, {"actor": abstract}).trees["actor"]
            _save(setup, learner.params, number)


def _save(setup: Setup, params: Any, steps: int) -> None:
    path = policy_of(setup.config, steps)
    print(f"wrote {save_policy(setup, params, 'ppo', steps, path.name)}")


def _evaluated(config: Config, steps: int) -> Candidate:
    asked = config.selection
    checkpoint = str(policy_of(config, steps))
    changes = {"checkpoint": checkpoint, "name": validation_name(steps), "split": "validation",
               "attempts": asked.attempts, "limit": asked.limit, "endpoint": ""}  # fmt: skip
    section = config.evaluation.model_copy(update=changes)
    told = evaluate(config.model_copy(update={"evaluation": section}))
    return Candidate(
        steps=steps,
        checkpoint=checkpoint,
        pass_at_1=told["pass_at_1"],
        ci95=told["ci95"],
        mean_fraction=told["mean_fraction"]["value"],
        tasks=told["tasks"],
        attempts=told["attempts"],
    )

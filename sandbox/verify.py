"""From a verifier's report to a verdict: what passed, out of how many, and whether to believe it.

The denominator is the oracle's: an agent that breaks collection, deletes tests or makes them skip
loses what is missing. A report that cannot be counted is an infrastructure error, never reward 0;
trial.py then asks a verifier without the agent's work who is to blame.
"""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sandbox.reports import Report, Source, Status, bounded

DISAGREEMENT = "report and reward file disagree"
PAPER_SCALE = 20  # T1's reward: assertions passed / 20


class Outcome(StrEnum):
    """How a trial ended."""

    solved = "solved"
    partial = "partial"
    failed = "failed"
    agent_timeout = "agent_timeout"  # verified all the same, as the next two
    context_full = "context_full"
    turns_exhausted = "turns_exhausted"
    verifier_timeout = "verifier_timeout"
    infra_error = "infra_error"
    cancelled = "cancelled"


UNGRADED = frozenset({Outcome.infra_error, Outcome.cancelled})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the audit recorded for a task: the assertions there are, and those that cost nothing."""

    oracle_passed: frozenset[str]
    nop_passed: frozenset[str]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Baseline":
        return cls(
            oracle_passed=frozenset(fields["oracle_passed"]),
            nop_passed=frozenset(fields["nop_passed"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Assertions passed of those that count; `reward` is what a number can be made of."""

    outcome: Outcome
    source: Source
    passed: frozenset[str]
    total: int
    nop_passed: int | None  # assertions that doing nothing passes; None where no audit says so
    rewards: dict[str, float]
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", bounded(self.flags))

    @property
    def graded(self) -> bool:
        """False where the verdict says nothing about the agent, so that no reward exists."""
        return self.outcome not in UNGRADED

    @property
    def gained(self) -> float:
        """The share of what there was to gain beyond doing nothing; below 0 where work was lost."""
        if self.nop_passed is None:
            raise ValueError("what doing nothing passes is not known: audit the task")
        if self.total == self.nop_passed:
            raise ValueError("doing nothing passes every assertion: nothing can be gained")
        return (len(self.passed) - self.nop_passed) / (self.total - self.nop_passed)

    def to_json(self) -> dict[str, Any]:
        """Everything of it; rewards are null where there is none, so that none is taken for 0."""
        known = self.nop_passed is not None and self.total > self.nop_passed
        gained = self.gained if self.graded and known else None
        return {
            "source": self.source.value,
            "passed": sorted(self.passed) if self.graded else None,
            "total": self.total,
            "nop_passed": self.nop_passed,
            "gained": gained,
            "rewards": self.rewards,
            "flags": list(self.flags),
        }

    def reward(self, kind: str = "assertions") -> float:
        """One of the rewards of the recipe.

        Raises:
          ValueError: the kind is unknown, or the trial was not graded and has no reward.
        """
        if not self.graded:
            raise ValueError(f"{self.outcome} has no reward; leave the trial out")
        binary = float(self.total > 0 and len(self.passed) == self.total)
        fraction = len(self.passed) / self.total if self.total else 0.0
        kinds = {
            "assertions": len(self.passed) / PAPER_SCALE,
            "fraction": fraction,
            "fraction_bonus": fraction + 0.2 * binary,
            "binary": binary,
        }
        if kind == "gained":
            return self.gained
        if kind not in kinds:
            raise ValueError(f"reward {kind!r} is unknown; there are {[*kinds, 'gained']}")
        return kinds[kind]


def judge(report: Report, baseline: Baseline | None = None) -> Verdict:
    """Counts a report against the oracle's assertions, or its own where no audit was made."""
    known = frozenset(report.assertions) if baseline is None else baseline.oracle_passed
    flags = list(report.problems) + _doubts(report, known)
    passed = report.passed & known
    if not report.usable:
        outcome = Outcome.infra_error
    elif disagrees(report, known):
        outcome, passed = Outcome.failed, frozenset()
        flags.append(DISAGREEMENT)
    else:
        outcome = grade(len(passed), len(known))
    return Verdict(
        outcome=outcome,
        source=report.source,
        passed=passed,
        total=len(known),
        nop_passed=None if baseline is None else len(baseline.nop_passed & known),
        rewards=report.rewards,
        flags=tuple(flags),
    )


def grade(passed: int, total: int) -> Outcome:
    if passed == total:
        return Outcome.solved
    return Outcome.partial if passed else Outcome.failed


def disagrees(report: Report, known: frozenset[str]) -> bool:
    """True where a reward of 1 stands beside a failed test, or less where every one passed.

    Skipped tests are no disagreement: pytest calls such a run a success; they are only not counted.
    """
    if report.source in (Source.reward_json, Source.reward_txt, Source.nothing):
        return False
    unreadable = any(p.startswith(("reward.json:", "reward.txt:")) for p in report.problems)
    if unreadable or not report.rewards:
        return unreadable
    reward = report.rewards.get("reward", min(report.rewards.values()))
    statuses = set(report.assertions.values())
    if reward >= 1:
        return bool(statuses & {Status.failed, Status.other})
    return statuses == {Status.passed} and known <= report.passed


def _doubts(report: Report, known: frozenset[str]) -> list[str]:
    """What a person should know of a report that can be counted."""
    if not report.usable:
        return []
    missing, extra = known - set(report.assertions), set(report.assertions) - known
    skipped = [name for name in known if report.assertions.get(name) == Status.skipped]
    doubts = [
        (len(missing), f"{len(missing)} of the oracle's {len(known)} assertions are missing"),
        (len(extra), f"{len(extra)} assertions that the oracle did not have are not counted"),
        (len(skipped), f"{len(skipped)} assertions were skipped, which is no pass"),
    ]
    return [text for count, text in doubts if count]

"""`t1jax audit`: is a task worth training on? Executed checks, static checks, one line a task.

Executed, with real sandboxes: the oracle passes every assertion three times in a row, doing nothing
does not pass them all, and the cheat gains nothing. The record holds what later verdicts need: the
oracle's assertions (the denominator) and those that doing nothing passes.
An audit that was interrupted goes on: tasks whose files have not changed keep their line.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from sandbox import scorer, static_checks
from sandbox import task as tasks
from sandbox.agents import Agent, Nop, Oracle, Terminal
from sandbox.base import Backend, BuildError, InfraError, RefusedError
from sandbox.cheat import Cheat
from sandbox.scorer import Endpoint, NotScoredError
from sandbox.static_checks import Finding, Severity, content_digest
from sandbox.task import Task, TaskError, UnsupportedTask
from sandbox.trial import TrialConfig, TrialResult, run_trial
from sandbox.verify import Baseline, Outcome

ORACLE_RUNS = 3
MEMORY_PEAK = (
    "cat /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes 2> /dev/null"
)


class Decision(StrEnum):
    """What the audit says of a task."""

    accept = "accept"
    review = "review"  # runs as it should; a person should look at what was found
    reject = "reject"
    unsupported = "unsupported"
    infra_error = "infra_error"  # says nothing of the task; audited again when the audit is resumed


@dataclasses.dataclass(kw_only=True)
class Record:
    """One line of the audit, filled while it runs."""

    task: str
    path: str
    digest: str
    decision: Decision = Decision.accept
    reasons: list[str] = dataclasses.field(default_factory=list)
    oracle_passed: list[str] = dataclasses.field(default_factory=list)
    nop_passed: list[str] = dataclasses.field(default_factory=list)
    cheat_gained: float | None = None
    cheat_flags: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    usage: dict[str, float] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    score: dict[str, Any] | None = None

    def add(self, decision: Decision, reason: str) -> None:
        """The worst decision stands, with every reason."""
        order = list(Decision)
        if order.index(decision) > order.index(self.decision):
            self.decision = decision
        self.reasons.append(reason)

    def add_findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            rejected = finding.severity == Severity.reject
            self.add(Decision.reject if rejected else Decision.review, finding.text)

    @property
    def runnable(self) -> bool:
        return self.decision in (Decision.accept, Decision.review)

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, default=str) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Record":
        """Raises ValueError, TypeError or KeyError for what `to_line` did not write."""
        fields = json.loads(line)
        record = cls(**fields | {"decision": Decision(fields["decision"])})
        for field in dataclasses.fields(cls):
            if field.type in (str, list[str]) and not isinstance(
                getattr(record, field.name), str if field.type is str else list
            ):
                raise TypeError(f"{field.name} is {getattr(record, field.name)!r}")
        return record


@dataclasses.dataclass(frozen=True)
class MeasuredOracle(Oracle):
    """The oracle, which asks its shell afterwards for the processor time of all it ran."""

    usage: dict[str, float] = dataclasses.field(default_factory=dict)

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        outcome = await super().run(task, terminal)
        spent = await terminal.run("times", timeout_s=30)
        words = spent.output.split()[-2:]
        if len(words) == 2 and all(word.endswith("s") and "m" in word for word in words):
            self.usage["cpu_s"] = round(sum(map(_seconds, words)), 3)
        peak = await terminal.run(MEMORY_PEAK, timeout_s=30)
        if peak.output.strip().isdigit():
            self.usage["memory_mb"] = round(int(peak.output) / 2**20, 1)
        return outcome


def _seconds(text: str) -> float:
    """Of what bash's `times` prints: 0m0.012s."""
    minutes, _, seconds = text.removesuffix("s").partition("m")
    return 60 * float(minutes) + float(seconds)


class Auditor:
    """Audits tasks on one back end."""

    def __init__(
        self,
        backend: Backend,
        *,
        config: TrialConfig,
        copies: dict[str, str],
        endpoint: Endpoint | None = None,
    ):
        self._backend, self._config = backend, config
        self._copies, self._endpoint = copies, endpoint

    async def audit(self, root: Path) -> Record:
        """Everything there is to say of the task in this directory."""
        record = Record(task=root.name, path=str(root), digest="")
        try:
            record.digest = content_digest(root)
            await self._judge(root, record)
        except (TaskError, ValueError) as error:
            record.add(Decision.reject, str(error))
        except Exception as error:  # a fault of ours or of the machine: the other tasks go on
            record.add(Decision.infra_error, f"{type(error).__name__}: {error}")
        if record.runnable and self._endpoint is not None:
            await self._score(tasks.load(root), record, self._endpoint)
        return record

    async def _judge(self, root: Path, record: Record) -> None:
        """What its files show and what running it shows; all of it, also of a rejected task."""
        try:
            task = tasks.load(root)
        except UnsupportedTask as error:
            record.add(Decision.unsupported, str(error))
            return
        record.task, record.metadata = task.name, dict(task.config.metadata)
        record.add_findings(static_checks.check(task))
        if str(root) in self._copies:
            record.add(Decision.reject, f"nearly the same text as {self._copies[str(root)]}")
        await self._execute(task, record)

    async def _score(self, task: Task, record: Record, endpoint: Endpoint) -> None:
        """Hard rejects reject; the total is for `select` to use."""
        try:
            score = await scorer.score(task, endpoint)
        except NotScoredError as error:
            record.add(Decision.review, str(error))
            return
        record.score = score.to_json()
        for name in score.hard_rejects:
            record.add(Decision.reject, f"hard reject by the scorer: {name}")

    async def _execute(self, task: Task, record: Record) -> None:
        """One check after the other, up to the first that finds something."""
        known = len(record.reasons)
        try:
            with tempfile.TemporaryDirectory(prefix="t1jax-audit-") as folder:
                for check in (self._oracle, self._nop, self._cheat):
                    await check(task, record, Path(folder))
                    if len(record.reasons) > known:
                        return
        except RefusedError as error:
            record.add(Decision.unsupported, str(error))
        except BuildError as error:
            record.add(Decision.reject, f"its image does not build: {error}")
        except InfraError as error:
            record.add(Decision.infra_error, str(error))

    async def _run(
        self, task: Task, agent: Agent, record: Record, folder: Path, key: str
    ) -> TrialResult:
        baseline = None
        if record.oracle_passed and not isinstance(agent, Oracle):
            baseline = Baseline(
                oracle_passed=frozenset(record.oracle_passed),
                nop_passed=frozenset(record.nop_passed),
            )
        result = await run_trial(
            task, agent, self._backend, folder / key, config=self._config, baseline=baseline
        )
        record.seconds[key] = {stage: round(s, 3) for stage, s in result.seconds.items()}
        if result.outcome == Outcome.infra_error:
            record.add(Decision.infra_error, f"{key}: {result.error}")
        return result

    async def _oracle(self, task: Task, record: Record, folder: Path) -> None:
        """Every assertion passes, three times, and they are the same ones."""
        agent = MeasuredOracle()
        found: list[tuple[list[str], int]] = []
        for turn in range(1, ORACLE_RUNS + 1):
            result = await self._run(task, agent, record, folder, f"oracle_{turn}")
            if result.verdict is None:
                return
            found.append((sorted(result.verdict.passed), result.verdict.total))
            if result.outcome != Outcome.solved and turn == 1:
                record.add(
                    Decision.reject,
                    f"the oracle is {result.outcome}: {len(found[0][0])} of {found[0][1]} "
                    f"assertions{_because(result)}",
                )
                return
        record.oracle_passed, record.usage = found[0][0], agent.usage
        if any(other != found[0] for other in found):
            counts = ", ".join(f"{len(passed)} of {total}" for passed, total in found)
            record.add(Decision.reject, f"flaky: the oracle's runs passed {counts}")

    async def _nop(self, task: Task, record: Record, folder: Path) -> None:
        """Doing nothing leaves something to gain."""
        result = await self._run(task, Nop(), record, folder, "nop")
        if result.verdict is None:
            return
        record.nop_passed = sorted(result.verdict.passed)
        if set(record.nop_passed) >= set(record.oracle_passed):
            record.add(Decision.reject, "nothing to gain: doing nothing passes every assertion")

    async def _cheat(self, task: Task, record: Record, folder: Path) -> None:
        """Every way around the work is worth no more than doing nothing."""
        result = await self._run(task, Cheat(), record, folder, "cheat")
        if result.verdict is None:
            return
        record.cheat_gained, record.cheat_flags = result.verdict.gained, list(result.verdict.flags)
        if record.cheat_gained > 0:
            record.add(Decision.reject, f"the cheat gains {record.cheat_gained:.2f}")


def _because(result: TrialResult) -> str:
    flags = "; ".join(result.verdict.flags) if result.verdict is not None else ""
    return f" ({flags})" if flags else ""


def find_copies(roots: Iterable[Path]) -> dict[str, str]:
    """Tasks that are nearly the same as an earlier one, by path."""
    instructions = {}
    for root in roots:
        path = root / "instruction.md"
        with contextlib.suppress(OSError):  # which its own audit then says
            instructions[str(root)] = path.read_text(encoding="utf-8", errors="replace")
    return static_checks.near_duplicates(instructions)

"""One trial's life: start, agent, verifier, verdict, and the sandbox gone whatever happened.

Owns the order, the time limits, the outcome and the trial's directory. An infrastructure error is
retried once from the beginning and is never a reward of 0. Cancelling is allowed at any await: the
sandbox is removed and the result says `cancelled`.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from sandbox import verifier
from sandbox.agents import Agent, Terminal
from sandbox.base import Backend, BuildError, InfraError, RefusedError, Sandbox, SandboxBrokenError
from sandbox.environment import environment_of
from sandbox.reports import Report, Source
from sandbox.task import Task
from sandbox.verifier import State, VerifierTimeoutError
from sandbox.verify import Baseline, Outcome, Verdict, judge

ATTEMPTS = 2  # an infrastructure error is tried once more
STAGES = ("build", "start", "agent", "verify", "stop")
FRESH, SHARED = "fresh", "shared"
OnStage = Callable[[str], None]  # told the name of each stage as it begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How trials are run; a task's own limits hold besides."""

    verification: str = ""  # fresh or shared; empty: as the task asks for
    agent_timeout_s: float = float("inf")  # beside the task's own
    attempts: int = ATTEMPTS

    def __post_init__(self) -> None:
        if self.verification not in ("", FRESH, SHARED):
            raise ValueError(
                f"verification = {self.verification!r}; expected {FRESH!r} or {SHARED!r}"
            )
        if not self.agent_timeout_s > 0 or self.attempts < 1:
            raise ValueError("agent_timeout_s and attempts have to be above 0")

    def is_fresh(self, task: Task) -> bool:
        return task.fresh if not self.verification else self.verification == FRESH


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial came to; `verdict` says what its assertions did where it was graded."""

    task: str
    agent: str
    outcome: Outcome
    verdict: Verdict | None
    seconds: dict[str, float]
    commands: int
    attempts: int
    error: str = ""
    folder: Path

    def to_json(self) -> dict[str, Any]:
        verdict = self.verdict
        graded = verdict is not None and self.outcome not in (
            Outcome.infra_error,
            Outcome.cancelled,
        )
        fields: dict[str, Any] = {
            "task": self.task,
            "agent": self.agent,
            "outcome": self.outcome.value,
            "graded": graded,
            "seconds": {stage: round(spent, 4) for stage, spent in self.seconds.items()},
            "commands": self.commands,
            "attempts": self.attempts,
            "error": self.error,
        }
        if verdict is not None:
            fields |= verdict.to_json()
        return fields


class Stopwatch:
    """Seconds spent in each stage, all attempts together."""

    def __init__(self, on_stage: OnStage):
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._on_stage = on_stage

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._on_stage(name)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - begin


async def run_trial(
    task: Task,
    agent: Agent,
    backend: Backend,
    folder: Path,
    *,
    config: TrialConfig = TrialConfig(),
    baseline: Baseline | None = None,
    on_stage: OnStage = lambda stage: None,
) -> TrialResult:
    """Runs one trial and leaves its directory: trajectory, the verifier's logs, result.json.

    Raises:
      UserError: the back end cannot run the task, or its image does not build.
    """
    refusal = backend.refusal(environment_of(task, backend.name))
    if refusal:
        raise RefusedError(f"{task.root}: {refusal}")
    if config.is_fresh(task) and (task.artifacts or task.knows_workdir):
        verifier.state_paths(task, task.workdir, backend.name)
    folder.mkdir(parents=True, exist_ok=True)
    trial = _Trial(task, agent, backend, folder, config, baseline, on_stage)
    try:
        result = await trial.run()
    except asyncio.CancelledError:
        _write_result(trial.result(Outcome.cancelled, None))
        raise
    _write_result(result)
    return result


class _Trial:
    """The state of one trial while it runs."""

    def __init__(
        self,
        task: Task,
        agent: Agent,
        backend: Backend,
        folder: Path,
        config: TrialConfig,
        baseline: Baseline | None,
        on_stage: OnStage,
    ):
        self.task, self.agent, self.backend = task, agent, backend
        self.folder, self.config, self.baseline = folder, config, baseline
        self.watch = Stopwatch(on_stage)
        self.attempts = self.commands = 0

    def result(self, outcome: Outcome, verdict: Verdict | None, error: str = "") -> TrialResult:
        return TrialResult(
            task=self.task.name,
            agent=self.agent.name,
            outcome=outcome,
            verdict=verdict,
            seconds=self.watch.seconds,
            commands=self.commands,
            attempts=self.attempts,
            error=error,
            folder=self.folder,
        )

    async def run(self) -> TrialResult:
        error = ""
        while self.attempts < self.config.attempts:
            self.attempts += 1
            try:
                ending, verdict = await self._attempt()
            except InfraError as infra:
                error = f"{infra}"
                continue
            outcome = verdict.outcome
            if ending is not None and outcome != Outcome.verifier_timeout:
                outcome = ending
            return self.result(outcome, verdict)
        return self.result(Outcome.infra_error, None, error)

    async def _attempt(self) -> tuple[Outcome | None, Verdict]:
        """How the agent ended where it was cut short, and what its work is worth."""
        environment = environment_of(self.task, self.backend.name)
        with self.watch.stage("build"):
            await self.backend.prepare(environment)
        fresh = self.config.is_fresh(self.task)
        async with self._opened(self.backend.sandbox(environment)) as box:
            workdir = self.task.workdir if self.task.knows_workdir else await _workdir(box)
            await _healthy(self.task, box)
            # Programs of local sandboxes are read-only mounts: nothing to compare.
            compared = not fresh and self.backend.name != "local"
            before = await verifier.fingerprint(box) if compared else {}
            with self.watch.stage("agent"):
                ending, broken = await self._run_agent(box)
            if not fresh:
                with self.watch.stage("verify"):
                    return ending, await self._verify_shared(box, before, broken)
            with self.watch.stage("verify"):
                state = await self._keep(box, workdir, broken)
        with contextlib.closing(state), self.watch.stage("verify"):
            return ending, await self._verify_fresh(state)

    @contextlib.asynccontextmanager
    async def _opened(self, box: Sandbox) -> AsyncIterator[Sandbox]:
        with self.watch.stage("start"):
            try:
                await box.__aenter__()
            except SandboxBrokenError as error:
                raise BuildError(f"the task's own set-up fails: {error}") from error
        try:
            yield box
        finally:
            with self.watch.stage("stop"):
                await box.__aexit__(None, None, None)

    async def _run_agent(self, box: Sandbox) -> tuple[Outcome | None, str]:
        """The agent's ending, and how it broke its own sandbox where it did."""
        limit = min(self.task.config.agent.timeout_sec or float("inf"), self.config.agent_timeout_s)
        terminal = Terminal(box, self.folder / "trajectory.jsonl")
        try:
            async with asyncio.timeout(None if limit == float("inf") else limit):
                return await self.agent.run(self.task, terminal), ""
        except TimeoutError:
            return Outcome.agent_timeout, ""
        except SandboxBrokenError as error:
            return None, f"the agent broke its sandbox: {error}"
        finally:
            self.commands = terminal.commands

    async def _keep(self, box: Sandbox, workdir: str, broken: str) -> State:
        try:
            problems = await verifier.collect(self.task, box)
            state = await verifier.save_state(self.task, box, workdir)
        except SandboxBrokenError as error:
            return State(problems=(broken or f"the agent broke its sandbox: {error}",))
        return dataclasses.replace(state, problems=(*problems, *state.problems))

    async def _verify_fresh(self, state: State) -> Verdict:
        logs = self._new_logs()
        try:
            report = await verifier.run_fresh(self.task, self.backend, state, logs)
        except VerifierTimeoutError as error:
            return self._timed_out(error)
        except SandboxBrokenError as error:
            report = verifier.unusable(f"the verifier's sandbox broke: {error}")
        return await self._judge(report, state.problems)

    async def _verify_shared(self, box: Sandbox, before: dict[str, str], broken: str) -> Verdict:
        logs = self._new_logs()
        flags, changed = [broken] if broken else [], list[str]()
        try:
            flags += await verifier.collect(self.task, box)
            after = await verifier.fingerprint(box) if before else {}
            changed = [path for path in before if before[path] != after[path]]
            flags += [f"the agent changed {', '.join(changed)}"] if changed else []
            report = await verifier.run_shared(self.task, box, logs)
        except VerifierTimeoutError as error:
            return self._timed_out(error)
        except SandboxBrokenError as error:
            report = verifier.unusable(f"the agent broke its sandbox: {error}")
        verdict = await self._judge(report, tuple(flags))
        if any(path in verifier.UNTOUCHABLE for path in changed):
            verdict = dataclasses.replace(verdict, outcome=Outcome.failed, passed=frozenset())
        return verdict

    async def _judge(self, report: Report, flags: tuple[str, ...]) -> Verdict:
        """The verdict; where nothing can be counted, a verifier without the work is asked too."""
        verdict = judge(report, self.baseline)
        if not verdict.graded:
            verdict = await self._blame(report)
        return dataclasses.replace(verdict, flags=(*flags, *verdict.flags))

    async def _blame(self, report: Report) -> Verdict:
        """Whose fault it is that nothing was reported: the agent's if without it there is a report.

        Raises:
          InfraError: the verifier does not report without the agent's work either.
        """
        problems = "; ".join(report.problems)
        try:
            control = await verifier.run_control(self.task, self.backend)
        except (VerifierTimeoutError, SandboxBrokenError) as error:
            raise InfraError(f"the verifier fails without any work too: {error}") from error
        if not control.usable:
            raise InfraError(f"the verifier reports nothing, without any work neither: {problems}")
        failed = judge(control, self.baseline)
        flag = f"the agent's work keeps the verifier from reporting: {problems}"
        return dataclasses.replace(
            failed,
            outcome=Outcome.failed,
            passed=frozenset(),
            rewards=report.rewards,
            source=report.source,
            flags=(flag,),
        )

    def _timed_out(self, error: VerifierTimeoutError) -> Verdict:
        known = self.baseline
        return Verdict(
            outcome=Outcome.verifier_timeout,
            source=Source.nothing,
            passed=frozenset(),
            total=0 if known is None else len(known.oracle_passed),
            nop_passed=None if known is None else len(known.nop_passed & known.oracle_passed),
            rewards={},
            flags=(str(error),),
        )

    def _new_logs(self) -> Path:
        """Where the verifier's logs of this attempt go; those of an earlier one are dropped."""
        logs = self.folder / "verifier"
        if logs.exists():
            shutil.rmtree(logs)
        return logs


async def _healthy(task: Task, box: Sandbox) -> None:
    """Waits until the task's healthcheck passes.

    Failures within the start period do not count, and are looked at again sooner.

    Raises:
      InfraError: it failed too often.
    """
    check = task.config.environment.healthcheck
    if check is None:
        return
    begin, failures = time.monotonic(), 0
    while True:
        done = await box.exec_once(check.command, timeout_s=check.timeout_sec)
        if done.exit_code == 0:
            return
        starting = time.monotonic() - begin < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            raise InfraError(f"healthcheck failed {failures} times: {done.output[-200:]}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


async def _workdir(box: Sandbox) -> str:
    """Where the image starts commands, asked before the agent can answer for it."""
    done = await box.exec_once("pwd -P", timeout_s=30)
    return done.output.strip()


def _write_result(result: TrialResult) -> None:
    """Last of a trial's files, and by a rename: a directory that has it is complete."""
    aside = result.folder / "result.json.incomplete"
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n"
    aside.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON's own escapes
    os.replace(aside, result.folder / "result.json")

"""What the commands `t1jax tasks`, `trial` and `audit` do, once their arguments are parsed.

Owns progress on stderr, signals, and the back end's life; results go to stdout.
"""

import asyncio
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sandbox import audit_file
from sandbox import task as tasks
from sandbox.agents import Agent, Nop, Oracle, Replay, Script
from sandbox.audit import Auditor, find_copies
from sandbox.base import make_backend
from sandbox.cheat import Cheat
from sandbox.pool import Gate, run_all
from sandbox.scorer import Endpoint
from sandbox.tasks.compose import STEPS_OF_LEVEL
from sandbox.tasks.families import FAMILIES
from sandbox.tasks.make import make
from sandbox.trial import TrialConfig, TrialResult, run_trial
from sandbox.verify import Outcome
from t1jax.errors import Preempted, UserError

AGENTS = ("oracle", "nop", "cheat", "script", "replay")
PLAIN_EVERY_S = 5.0


class Counter:
    """Progress of many equal things: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._began_s = self._shown_s = time.monotonic()
        self._bars: Bars | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            console = Console(stderr=True)
            self._bars = Bars(*columns, TimeRemainingColumn(), console=console)
            self._bars.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        elif error is None:
            self._print()

    def advance(self, done: int = 1) -> None:
        self._done += done
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[0], done)
        elif time.monotonic() - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = time.monotonic()
            self._print()

    def _print(self) -> None:
        elapsed_s = time.monotonic() - self._began_s
        line = f"{self._what}: {self._done} of {self._total}, {elapsed_s:.1f} s"
        print(line, file=sys.stderr, flush=True)


def make_tasks(
    out: str, *, seed: int, count: int, levels: Iterable[int], families: Iterable[str]
) -> None:
    """`t1jax tasks make`."""
    with Counter("tasks", count) as progress:
        counts = make(
            out,
            seed=seed,
            count=count,
            levels=tuple(levels) or tuple(STEPS_OF_LEVEL),
            families=tuple(families) or tuple(FAMILIES),
            advance=progress.advance,
        )
    print(f"{out}: " + ", ".join(f"{number} {split}" for split, number in counts.items()))


def select_tasks(
    audit: str,
    *,
    keep: Iterable[str],
    seed: int,
    count: int | None,
    min_score: float | None,
    out: str,
) -> None:
    """`t1jax tasks select`: the list on stdout, or in a file that appears when it is complete."""
    chosen = audit_file.select(Path(audit), keep=keep, seed=seed, count=count, min_score=min_score)
    text = "".join(map(audit_file.list_line, chosen))
    if not out:
        sys.stdout.write(text)
        return
    aside = Path(f"{out}.incomplete")
    aside.write_text(text, encoding="utf-8")
    aside.replace(out)
    print(f"{out}: {len(chosen)} tasks")


def make_agent(name: str, *, commands: str = "", trajectory: str = "") -> Agent:
    """The agent of this name.

    Raises:
      UserError: there is no such agent, or it lacks its file.
    """
    if name == "script":
        if not commands:
            raise UserError("agent script needs --commands FILE, one command a line")
        return Script(tuple(_lines(Path(commands))))
    if name == "replay":
        if not trajectory:
            raise UserError("agent replay needs --trajectory FILE, a trial's trajectory.jsonl")
        return Replay(Path(trajectory))
    plain: dict[str, Agent] = {"oracle": Oracle(), "nop": Nop(), "cheat": Cheat()}
    if name not in plain:
        raise UserError(f"no agent {name!r}; there are {', '.join(AGENTS)}")
    return plain[name]


def trial(
    root: str,
    *,
    agent: Agent,
    sandbox: str,
    endpoints: str,
    config: TrialConfig,
    keep: str,
    audit: str,
) -> None:
    """`t1jax trial`: one trial, its result as JSON; its directory stays if `keep` says where.

    Raises:
      UserError: an infrastructure error, which says nothing about the agent.
    """
    task = tasks.load(root)
    baseline = audit_file.baseline_of(Path(audit), task.root) if audit else None

    async def run(folder: Path) -> TrialResult:
        backend = make_backend(sandbox, endpoints=endpoints)
        try:
            return await run_trial(
                task,
                agent,
                backend,
                folder,
                config=config,
                baseline=baseline,
                on_stage=lambda stage: print(f"{task.name}: {stage}", file=sys.stderr, flush=True),
            )
        finally:
            await backend.close()

    with tempfile.TemporaryDirectory(prefix="t1jax-trial-") as scratch:
        folder = Path(keep or scratch) / f"{task.root.name}__{secrets.token_hex(4)}"
        result = run_until_done(run(folder), UserError("ended by a signal; the sandbox is removed"))
    fields = result.to_json() | ({"folder": str(folder)} if keep else {})
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)
    if result.outcome == Outcome.infra_error:
        raise UserError(f"{task.name}: infrastructure error: {result.error}")


def audit(
    root: str,
    *,
    sandbox: str,
    endpoints: str,
    jobs: int,
    out: str,
    config: TrialConfig,
    endpoint: Endpoint | None = None,
) -> None:
    """`t1jax audit`: every task that the file does not have yet, then a table of all."""
    roots = list(tasks.find(root))
    copies = find_copies(roots)
    file = audit_file.AuditFile(Path(out))

    async def run(waiting: list[Path], progress: Counter) -> None:
        backend = make_backend(sandbox, endpoints=endpoints)
        auditor = Auditor(backend, config=config, copies=copies, endpoint=endpoint)

        async def one(path: Path) -> None:
            file.add(await auditor.audit(path))
            progress.advance()

        try:
            await run_all(waiting, one, Gate(jobs), jobs)
        finally:
            await backend.close()

    try:
        waiting = [path for path in roots if not file.is_done(path)]
        with Counter("audit", len(waiting)) as progress:
            run_until_done(run(waiting, progress), Preempted(f"ended by a signal; {out} goes on"))
    finally:
        file.close()
    known = {str(path) for path in roots}
    Console().print(audit_file.table(r for r in file.records.values() if r.path in known))


def run_until_done(work: Coroutine[Any, Any, Any], ended: Exception) -> Any:
    """asyncio.run that ends on Ctrl-C and SIGTERM by cancelling, so that sandboxes are removed.

    Raises:
      `ended` when a signal ended it; a Preempted says which.
    """

    signals = signal.SIGINT, signal.SIGTERM

    async def main() -> Any:
        doing = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def end(number: signal.Signals) -> None:
            if isinstance(ended, Preempted):
                ended.number = number
            doing.cancel()

        for number in signals:
            loop.add_signal_handler(number, end, number)
        try:
            return await doing
        except asyncio.CancelledError:
            raise ended from None
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    return asyncio.run(main())


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None

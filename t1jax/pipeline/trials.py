"""Many trials at once: how many run together, which are done already, when enough have ended.

Owns the directory of every trial and its last file, played.json: a trial that has it is never
played again by the same settings. Knows nothing of policies: a `Play` makes one episode. An
infrastructure fault, or a task that cannot be run, is a result of its own kind, never a reward.
"""

import asyncio
import dataclasses
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sandbox.base import Backend, BuildError, RefusedError, make_backend
from sandbox.pool import Gate
from sandbox.task import Task, TaskError
from sandbox.trial import TrialResult
from sandbox.verify import UNGRADED, Outcome
from t1jax.agent.episode import Episode, Usage, reward_of
from t1jax.config import SandboxSection
from t1jax.errors import UserError
from t1jax.pipeline.watch import Watch

PLAYED = "played.json"
SETTINGS = "settings.json"
CANNOT_RUN = (RefusedError, BuildError, TaskError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One trial to be played."""

    task: Task
    attempt: int
    seed: int
    version: int = 0  # of the weights that are to play it

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.task.root.name}__{self.attempt}"

    def label(self, field: str) -> str:
        """A word of the task's own description, such as its category."""
        return str(self.task.config.metadata.get(field, ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What a trial came to, as a line of results. Rewards are None where it was not graded."""

    task: str
    attempt: int
    seed: int
    version: int
    category: str
    difficulty: str
    outcome: str
    solved: bool | None  # every assertion passes, whatever ended the agent
    fraction: float | None
    gained: float | None
    passed: int | None
    total: int | None
    usage: Usage
    commands: int
    seconds: dict[str, float]
    flags: list[str]
    error: str

    @property
    def graded(self) -> bool:
        return self.solved is not None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Played":
        return cls(**(fields | {"usage": Usage(**fields["usage"])}))


class Play(Protocol):
    """Makes one episode, its files below `folder`."""

    async def __call__(self, job: Job, backend: Backend, folder: Path, watch: Watch) -> Episode: ...


def make_jobs(
    tasks: Sequence[Task], *, seed: int, step: int, version: int = 0, attempts: int = 1
) -> list[Job]:
    """Jobs in the tasks' order; a task that stands there twice is attempted twice."""
    met: Counter[Path] = Counter()
    names: dict[str, Path] = {}
    jobs = []
    for task in tasks:
        other = names.setdefault(task.root.name, task.root)
        if other != task.root:
            raise UserError(
                f"{other} and {task.root} are both named {task.root.name}; their trials would "
                "share a directory: rename one"
            )
        for _ in range(attempts):
            attempt = met[task.root]
            met[task.root] += 1
            drawn = episode_seed(seed, step, task.name, attempt)
            jobs.append(Job(task=task, attempt=attempt, seed=drawn, version=version))
    return jobs


def episode_seed(seed: int, step: int, task: str, attempt: int) -> int:
    """The seed of an episode, the same on every machine: 32 bits of all that tells it apart."""
    parts = (seed, step, zlib.crc32(task.encode()), attempt)
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Writes down what a folder's trials depend on; another run with other ones is refused."""
    file = folder / SETTINGS
    if file.is_file():
        known = json.loads(file.read_text())
        changed = [name for name in settings if known.get(name) != settings[name]]
        if changed:
            name = changed[0]
            raise UserError(
                f"{folder} holds trials with {name} = {known.get(name)!r}, and now it is "
                f"{settings[name]!r}; give another name, or remove the folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)


def write_json(file: Path, fields: Any) -> None:
    """A small file that appears whole."""
    aside = file.with_name(file.name + ".incomplete")
    aside.write_text(json.dumps(fields, indent=1) + "\n")
    os.replace(aside, file)


async def play_all(
    jobs: Sequence[Job],
    play: Play,
    folder: Path,
    sandbox: SandboxSection,
    watch: Watch,
    *,
    wanted: int | None = None,
) -> list[Played | None]:
    """Plays jobs, `sandbox.jobs` at a time, until `wanted` are graded; the rest are cancelled.

    Returns what became of each job, in their order; None for those that were cancelled or came
    too late, whose directories are gone. Trials that the folder has are taken as they are.
    """
    enough = len(jobs) if wanted is None else wanted
    backend = make_backend(sandbox.kind, endpoints=sandbox.endpoints)
    try:
        return await _play_until(jobs, play, folder, backend, Gate(sandbox.jobs), watch, enough)
    finally:
        await backend.close()


async def _play_until(
    jobs: Sequence[Job],
    play: Play,
    folder: Path,
    backend: Backend,
    gate: Gate,
    watch: Watch,
    enough: int,
) -> list[Played | None]:
    results: list[Played | None] = [None] * len(jobs)
    for index, job in enumerate(jobs):
        results[index] = _known(job, folder / job.name)
    for played in filter(None, results):
        watch.finished(played.outcome, played.fraction, resumed=True)

    async def one(job: Job) -> Played:
        async with gate.place():
            return await _play(job, play, folder / job.name, backend, watch)

    left = [index for index, played in enumerate(results) if played is None]
    running = {asyncio.create_task(one(jobs[index])): index for index in left}
    try:
        while running and _graded(results) < enough:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ended, key=running.__getitem__):
                results[running.pop(task)] = task.result()
    finally:
        await _cancel(running)
    return _first(results, jobs, folder, enough)


def _graded(results: Iterable[Played | None]) -> int:
    return sum(played is not None and played.graded for played in results)


async def _cancel(running: Iterable["asyncio.Task[Played]"]) -> None:
    """Ends what runs and waits until its sandboxes are gone."""
    for task in running:
        task.cancel()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


def _first(
    results: list[Played | None], jobs: Sequence[Job], folder: Path, enough: int
) -> list[Played | None]:
    """Of what ended at the same moment only as many as were wanted; the others' files go."""
    kept = 0
    for index, played in enumerate(results):
        if played is not None and played.graded:
            kept += 1
            if kept > enough:
                results[index] = None
        if results[index] is None:
            shutil.rmtree(folder / jobs[index].name, ignore_errors=True)
    return results


def _known(job: Job, folder: Path) -> Played | None:
    """What an earlier run made of it, if it was graded."""
    file = folder / PLAYED
    if not file.is_file():
        return None
    try:
        played = Played.from_json(json.loads(file.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is no trial's result ({error}); remove its directory") from None
    same = (played.seed, played.version) == (job.seed, job.version)
    return played if played.graded and same else None


async def _play(job: Job, play: Play, folder: Path, backend: Backend, watch: Watch) -> Played:
    """One job; its directory is complete, or will be played again."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with watch.running():
        try:
            played = played_of(job, await play(job, backend, folder, watch))
        except CANNOT_RUN as error:
            played = _not_run(job, f"{error}")
    write_json(folder / PLAYED, played.to_json())
    watch.finished(played.outcome, played.fraction)
    return played


def played_of(job: Job, episode: Episode) -> Played:
    """The line of results of an episode."""
    result = episode.result
    return _played(
        job,
        outcome=result.outcome.value,
        usage=episode.usage,
        commands=result.commands,
        seconds={stage: round(spent, 4) for stage, spent in result.seconds.items()},
        error=result.error,
        **_graded_facts(result),
    )


UNKNOWN = ("solved", "fraction", "gained", "passed", "total")


def _graded_facts(result: TrialResult) -> dict[str, Any]:
    """What the verdict says of the work; nothing where there is no reward."""
    verdict, outcome = result.verdict, result.outcome
    flags = [] if verdict is None else list(verdict.flags)
    facts: dict[str, Any] = dict.fromkeys(UNKNOWN) | {"flags": flags}
    if verdict is None or reward_of(verdict, outcome, "binary") is None:
        return facts
    known = verdict.nop_passed is not None and verdict.total > verdict.nop_passed
    return facts | {
        "solved": verdict.reward("binary") == 1.0,
        "fraction": verdict.reward("fraction"),
        "gained": verdict.gained if known else None,
        "passed": len(verdict.passed),
        "total": verdict.total,
    }


def _not_run(job: Job, error: str) -> Played:
    return _played(
        job,
        outcome=Outcome.infra_error.value,
        usage=Usage(),
        commands=0,
        seconds={},
        flags=[],
        error=error,
        **dict.fromkeys(UNKNOWN),
    )


def _played(job: Job, **facts: Any) -> Played:
    return Played(
        task=job.task.name,
        attempt=job.attempt,
        seed=job.seed,
        version=job.version,
        category=job.label("category"),
        difficulty=job.label("difficulty"),
        **facts,
    )


def count(jobs: Sequence[Job], results: Sequence[Played | None]) -> dict[str, float]:
    """How many trials came to what; the cancelled ones by category as well."""
    counts: Counter[str] = Counter(launched=len(jobs), graded=0, cancelled=0, infra_error=0)
    for job, played in zip(jobs, results, strict=True):
        if played is None:
            counts["cancelled"] += 1
            counts[f"cancelled/{job.label('category') or 'none'}"] += 1
        elif Outcome(played.outcome) in UNGRADED:
            counts["infra_error"] += 1
        else:
            counts["graded"] += 1
            counts[f"outcome/{played.outcome}"] += 1
    return dict(counts)

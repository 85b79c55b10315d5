"""Agents that need no model: oracle, nop, cheat, script, replay.

An agent is given the task and a terminal, and returns why it stopped where that is no success of
its own. Limits of time are the trial's business.
"""

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sandbox.base import ExecResult, Sandbox
from sandbox.task import Task, TaskError, expand
from sandbox.verify import Outcome
from t1jax.errors import UserError

COMMAND_TIMEOUT_S = 600.0
SHOWN_CHARACTERS = 8192  # of a command's output kept in the trajectory
LEFT_OUT = "\n[… {} characters left out …]\n"


class Terminal:
    """Runs an agent's commands and writes each to the trajectory as soon as it has ended."""

    def __init__(self, box: Sandbox, trajectory: Path):
        self.box = box
        self.commands = 0
        self._trajectory = trajectory
        trajectory.touch()

    async def run(self, command: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> ExecResult:
        begin = time.monotonic()
        done = await self.box.exec(command, timeout_s=timeout_s)
        self.commands += 1
        self._write(command, done, time.monotonic() - begin)
        return done

    def _write(self, command: str, done: ExecResult, seconds: float) -> None:
        entry = {
            "command": command,
            "output": shortened(done.output),
            "exit_code": done.exit_code,
            "timed_out": done.timed_out,
            "seconds": round(seconds, 4),
        }
        with self._trajectory.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def shortened(output: str, most: int = SHOWN_CHARACTERS) -> str:
    """At most so many characters: head, a note of how much is left out, tail."""
    if len(output) <= most:
        return output
    half = max(most - len(LEFT_OUT.format(len(output))), 0) // 2
    tail = len(output) - half
    return f"{output[:half]}{LEFT_OUT.format(tail - half)}{output[tail:]}"


class Agent(Protocol):
    """Something that works on a task; returns an outcome only where it was cut short."""

    @property
    def name(self) -> str: ...

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None: ...


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Runs the task's own solution."""

    name: str = "oracle"

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        script = task.solution / "solve.sh"
        if not script.is_file():
            raise TaskError(f"{script} is missing; the oracle agent runs it")
        await terminal.box.upload(task.solution, "/solution")
        env = expand(task.config.solution.env, os.environ, f"{task.root}/task.toml: solution.env")
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
        await terminal.run(f"{exports}bash /solution/solve.sh", timeout_s=_no_limit(task))
        return None


@dataclasses.dataclass(frozen=True)
class Nop:
    """Does nothing: what a task gives for free."""

    name: str = "nop"

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        return None


@dataclasses.dataclass(frozen=True)
class Script:
    """Runs fixed commands, one after the other, whatever they return."""

    commands: Sequence[str]
    name: str = "script"

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        for command in self.commands:
            await terminal.run(command)
        return None


class Replay(Script):
    """Runs the commands of a recorded trajectory again."""

    def __init__(self, trajectory: Path):
        super().__init__(tuple(read_commands(trajectory)), name="replay")


def read_commands(trajectory: Path) -> list[str]:
    """Commands of a trajectory.jsonl, in order."""
    commands = []
    try:
        lines = trajectory.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {trajectory}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry: Any = json.loads(line)
            commands.append(str(entry["command"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{trajectory} line {number}: expected {{"command": …}}, as a trial writes it'
            ) from None
    return commands


def _no_limit(task: Task) -> float:
    """The agent's whole time: the trial ends the oracle's one command when it is over."""
    limit = task.config.agent.timeout_sec
    return limit if limit is not None else 24 * 3600.0

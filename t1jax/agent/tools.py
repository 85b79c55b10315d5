"""The tools of an episode, `bash` and `submit`, and what the policy is told after each turn.

Every mistake of the policy becomes a short reply and the episode goes on. Knows nothing of tokens
or of how replies are laid out: that is the conversation's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sandbox.agents import shortened
from sandbox.base import ExecResult
from t1jax.config import AgentSection
from t1jax.trajectory.markup import ToolCall

BASH: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the terminal. Its directory and variables last.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command."}},
            "required": ["command"],
        },
    },
}
SUBMIT: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "End the work when the task is done.",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS = (BASH, SUBMIT)
PARAMETERS = {"bash": ("command",), "submit": ()}
NO_CALL = "no tool was called: call bash to go on, or submit when the task is done"
OF_TURN = -1


class Terminal(Protocol):
    """What an episode needs of a sandbox; sandbox.agents.Terminal is one."""

    async def run(self, command: str, *, timeout_s: float) -> ExecResult: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    """A turn as the harness sees it; what is wrong with it is said in sentences for the policy."""

    calls: Sequence[ToolCall] = ()
    problems: Mapping[int, str] = dataclasses.field(default_factory=dict)  # of calls, by number
    errors: Sequence[str] = ()  # what was meant as a call and cannot be read as one
    cut: bool = False  # at the limit of a turn's tokens


@dataclasses.dataclass(frozen=True)
class Reply:
    """What comes back to the policy: a tool's output or, where no tool was called, a remark."""

    text: str
    call: int = OF_TURN  # which of the turn's calls it answers
    remark: bool = False


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What happened in an episode, for its record."""

    calls: int = 0
    malformed: int = 0
    without_call: int = 0
    cut: int = 0
    submitted: bool = False


class Tools:
    """Answers turns with one terminal."""

    def __init__(self, terminal: Terminal, limits: AgentSection):
        self._terminal, self._limits = terminal, limits
        self.counts = Counts()

    async def answer(self, said: Said) -> list[Reply]:
        """Runs a turn's calls in order; `counts.submitted` where it ended the work."""
        self.counts.cut += said.cut
        replies: list[Reply] = []
        for number, call in enumerate(said.calls):
            problem = said.problems.get(number) or misuse(call)
            if not problem and call.name == "submit":
                self.counts.submitted = True
                return replies
            self.counts.calls += 1
            self.counts.malformed += bool(problem)
            text = problem or await self._bash(call.arguments["command"])
            replies.append(Reply(text, number))
        self.counts.malformed += len(said.errors)
        replies += [Reply(self._explained(error, said)) for error in said.errors]
        if not replies:
            self.counts.without_call += 1
            replies.append(Reply(self._explained(NO_CALL, said), remark=True))
        return replies

    async def _bash(self, command: str) -> str:
        limit_s = self._limits.command_seconds
        done = await self._terminal.run(command, timeout_s=limit_s)
        notes = []
        if done.timed_out:
            notes.append(f"[stopped after {limit_s:g} s]")
        elif done.exit_code != 0:
            notes.append(f"[exit code {done.exit_code}]")
        if done.restarted:
            notes.append("[the shell ended; the next command has a new one]")
        return _noted(done.output, notes, self._limits.output_characters)

    def _explained(self, error: str, said: Said) -> str:
        if not said.cut:
            return f"error: {error}"
        return f"error: {error} (the turn was cut at {self._limits.turn_tokens} tokens)"


def misuse(call: ToolCall) -> str:
    """What is wrong with a call that can be read, for the policy; empty if nothing."""
    if call.name not in PARAMETERS:
        return f"error: there is no tool {call.name!r}; there are bash and submit"
    wanted = PARAMETERS[call.name]
    unknown = [name for name in call.arguments if name not in wanted]
    if unknown:
        expected = f"it takes {', '.join(wanted)}" if wanted else "it takes none"
        return f"error: {call.name} has no parameter {unknown[0]!r}; {expected}"
    if any(not call.arguments.get(name, "").strip() for name in wanted):
        return f"error: {call.name} needs the parameter {wanted[0]}"
    return ""


def _noted(output: str, notes: Sequence[str], most: int) -> str:
    """The output and the notes below it, in at most so many characters."""
    below = "".join(f"\n{note}" for note in notes)
    if len(output) + len(below) > most:
        output = shortened(output, max(most - len(below), 0))
    return (output.rstrip("\n") + below).removeprefix("\n") if below else output

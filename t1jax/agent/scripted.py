"""Policies that say what was written for them: a task's own solution, as turns of tool calls.

Through the same recorder as a sampling policy they make trajectories to fine-tune on: every token
of the assistant is sampled, with probability 1. Nothing is read by a model, so no routes are known.
"""

import subprocess
from collections.abc import Iterable, Sequence

import numpy as np

from sandbox.task import Task, TaskError
from t1jax.errors import UserError
from t1jax.trajectory.chat import Chat, Message
from t1jax.trajectory.completion import Completion, Request
from t1jax.trajectory.record import Finish

CHECK_TIMEOUT_S = 10.0
ASKED: Message = {"role": "user", "content": "-"}  # stands before a turn where a template needs it


class Scripted:
    """Answers a conversation's turn n with the n-th of its messages, whatever was asked."""

    def __init__(self, chat: Chat, turns: Sequence[Message], *, thinking: bool):
        self._chat = chat
        self._turns = [turn_ids(chat, turn, thinking=thinking) for turn in turns]

    async def __call__(self, request: Request) -> Completion:
        roles = [role for role, _ in self._chat.messages_of(request.prompt)]
        number = roles.count("assistant") - 1  # the header that ends the prompt is one
        if not 0 <= number < len(self._turns):
            raise UserError(
                f"a script of {len(self._turns)} turns was asked for turn {number + 1}; its last "
                "has to submit"
            )
        whole = self._turns[number]
        ids = whole[: request.max_tokens]
        zeros = np.zeros(len(ids), np.float32)
        return Completion(
            ids=ids,
            logprobs=zeros,
            filtered_logprobs=zeros,
            first=len(request.prompt) + len(ids) - 1,
            routes=np.zeros((0, 0, 0), np.uint8),
            version=0,
            finish=Finish.stop if len(ids) == len(whole) else Finish.length,
            seconds={},
        )


def turn_ids(chat: Chat, message: Message, *, thinking: bool) -> np.ndarray:
    """What a policy would have sampled to say an assistant's message, its end token included."""
    rendered = chat.render([ASKED, {"role": "assistant", **message}], thinking=thinking)
    return rendered.ids[rendered.mask]


def calls(name: str, **arguments: str) -> Message:
    """A turn that is one tool call."""
    return {"content": "", "tool_calls": [{"name": name, "arguments": arguments}]}


def solution_turns(task: Task) -> list[Message]:
    """A task's solution, a command a turn, and the turn that submits.

    Raises:
      TaskError: the solution needs more than commands in one terminal.
    """
    return [*(calls("bash", command=command) for command in solution(task)), calls("submit")]


def solution(task: Task) -> list[str]:
    """The commands of solution/solve.sh, for a terminal that starts in the task's directory."""
    script = task.solution / "solve.sh"
    if not script.is_file():
        raise TaskError(f"{script} is missing; its commands are what is to be said")
    others = sorted(path.name for path in task.solution.iterdir() if path != script)
    if others or task.config.solution.env:
        needed = others[0] if others else "[solution] env"
        raise TaskError(
            f"{task.root}: its solution needs {needed} besides solve.sh, which no turn can bring"
        )
    found = [
        command
        for command in commands_of(script.read_text(encoding="utf-8").splitlines(), str(script))
        if command != f"cd {task.workdir}"
    ]
    if not found:
        raise TaskError(f"{script} has no command; expected what solves the task")
    return found


def commands_of(lines: Iterable[str], where: str) -> list[str]:
    """A script's commands, each as many lines as bash needs to read it whole."""
    commands: list[str] = []
    waiting: list[str] = []
    for line in lines:
        if not waiting and (not line.strip() or line.lstrip().startswith("#")):
            continue
        waiting.append(line)
        text = "\n".join(waiting)
        if _is_whole(text):
            commands.append(text)
            waiting = []
    if waiting:
        raise TaskError(f"{where}: bash cannot read the end of it: {waiting[0][:80]!r}")
    return commands


def _is_whole(text: str) -> bool:
    """Whether bash reads this as complete commands: no open quote, block or here-document."""
    if text.endswith("\\"):
        return False
    done = subprocess.run(
        ["bash", "--norc", "-n"], input=text + "\n", capture_output=True, text=True,
        timeout=CHECK_TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode == 0 and not done.stderr

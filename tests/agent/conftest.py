"""Episodes without a model or a sandbox: a tiny tokenizer, a terminal and policies that are told
what to say."""

import dataclasses

import numpy as np
import pytest

from sandbox.base import ExecResult
from t1jax.agent.conversation import Policy, TokenConversation
from t1jax.agent.episode import converse
from t1jax.agent.scripted import calls, turn_ids
from t1jax.agent.tools import Tools
from t1jax.checkpoint.init_tiny import SIZES, train_tokenizer
from t1jax.config import AgentSection
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.completion import Completion
from t1jax.trajectory.record import Ending, Finish, RouteShape, Sampling
from t1jax.trajectory.recorder import Recorder

SHAPE = RouteShape(layers=3, chosen=2, experts=16)
LIMITS = AgentSection(context_tokens=20_000, turn_tokens=500, thinking=False)
ENDING = Ending(task="demo", outcome="failed", reward=0.0)
SUBMIT = calls("submit")


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(train_tokenizer(SIZES["tiny"].vocab))


class FakeTerminal:
    """Answers every command with what it is told, and remembers the commands."""

    def __init__(self, output="", **facts):
        self.output, self.facts, self.commands = output, facts, []

    async def run(self, command, *, timeout_s):
        self.commands.append(command)
        return ExecResult(**{"output": self.output, "exit_code": 0, **self.facts})


def bash(command):
    return calls("bash", command=command)


def rows(first, last, shape=SHAPE):
    """Routes of tokens first..last-1, each with ids of its own."""
    t = np.arange(first, last)[:, None, None]
    layer = np.arange(shape.layers)[None, :, None]
    j = np.arange(shape.chosen)[None, None, :]
    return ((5 * layer + 3 * t + j) % shape.experts).astype(np.uint8)


class Engine:
    """Says given completions (ids) in order, with log-probs and routes as an engine that kept the
    cache of the turn before."""

    def __init__(self, completions, *, cached=True):
        self.completions, self.cached = [np.asarray(c, np.int32) for c in completions], cached
        self.requests = []

    async def __call__(self, request):
        whole = self.completions[len(self.requests)]
        read = 0
        if self.requests and self.cached:
            before = self.requests[-1]
            read = len(before.prompt) + len(self.completions[len(self.requests) - 1]) - 1
        self.requests.append(request)
        ids = whole[: request.max_tokens]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 64
        return Completion(
            ids=ids,
            logprobs=logprobs,
            filtered_logprobs=logprobs,
            first=read,
            routes=rows(read, len(request.prompt) + len(ids) - 1),
            version=4,
            finish=Finish.stop if int(ids[-1]) in request.stop_ids else Finish.length,
            seconds={"decode": 0.5},
        )


@dataclasses.dataclass
class Played:
    """An episode that was played, without a trial around it."""

    outcome: object
    chunk: object
    counts: object
    terminal: FakeTerminal
    requests: list


@pytest.fixture
def play(chat):
    """`await play(turns)` plays an episode; a turn is a message, or ids as sampled."""

    async def run(said, /, *, terminal=None, instruction="Do it.", **changes):
        limits = LIMITS.model_copy(update=changes)
        terminal = terminal or FakeTerminal()
        completions = [
            turn_ids(chat, t, thinking=limits.thinking) if isinstance(t, dict) else t for t in said
        ]
        engine = Engine(completions)
        recorder = Recorder(SHAPE)
        tools = Tools(terminal, limits)
        conversation = TokenConversation(
            Policy(complete=engine, chat=chat, shape=SHAPE),
            recorder,
            limits,
            sampling=Sampling(seed=7),
            session="demo",
        )
        outcome = await converse(conversation, instruction, tools, limits.turns)
        (chunk,) = recorder.finish(ENDING).chunks
        return Played(outcome, chunk, tools.counts, terminal, engine.requests)

    return run

"""A policy behind an OpenAI-compatible server: whole conversations out, messages in, text only.

The same loop, tools and limits as for a policy over tokens, so that models can be compared; no ids,
log-probs or routes, so nothing to train on. A server that does not answer is an infrastructure
fault, one that refuses a request is an error for the person who configured it.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from sandbox.agents import Terminal
from sandbox.base import Backend, InfraError
from sandbox.task import Task
from sandbox.trial import run_trial
from sandbox.verify import Baseline, Outcome
from t1jax.agent.episode import Episode, EpisodeConfig, Usage, converse
from t1jax.agent.tools import TOOLS, Reply, Said, Tools
from t1jax.config import AgentSection
from t1jax.errors import UserError
from t1jax.trajectory import markup
from t1jax.trajectory.completion import ContextFullError
from t1jax.trajectory.markup import ToolCall
from t1jax.trajectory.record import Sampling

CONVERSATION = "conversation.json"  # below a trial's directory
RETRIED_STATUSES = {408, 409, 429, 500, 502, 503, 504}
CONTEXT_WORDS = ("context_length", "context length", "maximum context", "context window")
BACK_OFF_S = 1.0
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """Where a model answers, e.g. http://localhost:8000/v1."""

    url: str
    model: str
    key: str = dataclasses.field(default="", repr=False)
    timeout_s: float = 900.0
    tries: int = 5


class Client:
    """Asks one server, any number of conversations at once."""

    def __init__(self, server: Server):
        self._server = server
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=server.timeout_s, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(self, body: Json) -> Json:
        """One chat completion.

        Raises:
          ContextFullError: the server says that the conversation is too long.
          UserError: it refuses the request.
          InfraError: it does not answer, or not with a completion, in any try.
        """
        server = self._server
        url = f"{server.url.rstrip('/')}/chat/completions"
        problem = ""
        for attempt in range(server.tries):
            if attempt:
                await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            try:
                answer = await self._http.post(url, json={"model": server.model, **body})
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in RETRIED_STATUSES:
                problem = f"status {answer.status_code}"
            elif answer.is_error:
                raise _refusal(url, answer)
            else:
                try:
                    return _checked(answer.json())
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    problem = f"no chat completion ({type(error).__name__}: {error})"
        raise InfraError(f"{url} gave no answer in {server.tries} tries: {problem}")


def _checked(answer: Json) -> Json:
    """An answer that has what is read of it."""
    message = answer["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        _ = (call["id"], call["function"]["name"], call["function"]["arguments"])
    return answer


def _refusal(url: str, answer: httpx.Response) -> UserError:
    said = " ".join(answer.text.split())[:300]
    if any(words in said.lower() for words in CONTEXT_WORDS):
        return ContextFullError(said)
    return UserError(
        f"{url} refuses: status {answer.status_code}: {said}; check URL, model, key and sampling "
        "(top_k is no part of OpenAI's API: set it to 0 where a server does not know it)"
    )


class ChatConversation:
    """A conversation as messages."""

    def __init__(self, client: Client, limits: AgentSection, sampling: Sampling):
        self._client, self._limits, self._sampling = client, limits, sampling
        self.messages: list[Json] = []
        self.usage = Usage()
        self._calls: list[str] = []  # ids of the last turn's

    async def open(self, instruction: str) -> Said:
        """The first turn."""
        if self._limits.system:
            self.messages.append({"role": "system", "content": self._limits.system})
        self.messages.append({"role": "user", "content": instruction})
        return await self._turn()

    async def go_on(self, replies: Sequence[Reply]) -> Said:
        """The turn after these replies."""
        for reply in replies:
            called = 0 <= reply.call < len(self._calls)
            kind = (
                {"role": "tool", "tool_call_id": self._calls[reply.call]}
                if called
                else {"role": "user"}
            )
            self.messages.append(kind | {"content": reply.text})
        return await self._turn()

    async def _turn(self) -> Said:
        limits, sampling, room = self._limits, self._sampling, self._room()
        body: Json = {
            "messages": self.messages,
            "tools": list(TOOLS),
            "max_tokens": min(limits.turn_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        answer = await self._client.ask(body)
        choice = answer["choices"][0]
        self._count(answer.get("usage") or {})
        return self._said(choice["message"], cut=choice.get("finish_reason") == "length")

    def _room(self) -> int:
        """Tokens that the context has left, by the server's own count of the last turn."""
        room = self._limits.context_tokens - self.usage.tokens
        if room < 1:
            raise ContextFullError(
                f"{self.usage.tokens} tokens fill a context of {self._limits.context_tokens}"
            )
        return room

    def _count(self, usage: Mapping[str, Any]) -> None:
        sampled = int(usage.get("completion_tokens") or 0)
        self.usage = Usage(
            turns=self.usage.turns + 1,
            tokens=int(usage.get("prompt_tokens") or 0) + sampled,
            sampled_tokens=self.usage.sampled_tokens + sampled,
        )

    def _said(self, message: Json, *, cut: bool) -> Said:
        """Keeps a message as the history's next, then reads it."""
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        kept: Json = {"role": "assistant", "content": content}
        self.messages.append(kept | ({"tool_calls": calls} if calls else {}))
        self._calls = [call["id"] for call in calls]
        if not calls:  # a server that leaves reading calls to its client
            parsed = markup.parse(content, thinking="</think>" in content)
            return Said(calls=parsed.calls, errors=parsed.errors, cut=cut)
        read = [_read(call["function"]) for call in calls]
        problems = {number: problem for number, (_, problem) in enumerate(read) if problem}
        return Said(calls=[call for call, _ in read], problems=problems, cut=cut)


def _read(function: Json) -> tuple[ToolCall, str]:
    """A call, and what is wrong with its arguments."""
    name = str(function["name"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, TypeError) as error:
        return ToolCall(name, {}), f"error: the arguments of {name} are no JSON: {error}"
    if not isinstance(arguments, dict) or not all(isinstance(v, str) for v in arguments.values()):
        return ToolCall(name, {}), f"error: {name} takes a JSON object of texts"
    return ToolCall(name, arguments), ""


class ChatAgent:
    """A model behind a server, as an agent of a trial."""

    name = "endpoint"

    def __init__(self, client: Client, config: EpisodeConfig):
        self._client, self._config = client, config
        self.conversation = ChatConversation(client, config.limits, config.sampling)

    async def run(self, task: Task, terminal: Terminal) -> Outcome | None:
        """An attempt of the trial, from the beginning."""
        limits = self._config.limits
        self.conversation = ChatConversation(self._client, limits, self._config.sampling)
        tools = Tools(terminal, limits)
        return await converse(self.conversation, task.instruction, tools, limits.turns)


async def run_chat_episode(
    task: Task,
    backend: Backend,
    client: Client,
    folder: Path,
    config: EpisodeConfig,
    *,
    baseline: Baseline | None = None,
) -> Episode:
    """One trial of a task by a model behind a server: its directory, with the conversation."""
    agent = ChatAgent(client, config)
    result = await run_trial(
        task, agent, backend, folder, config=config.limited_trial, baseline=baseline
    )
    text = json.dumps(agent.conversation.messages, indent=1, ensure_ascii=True)
    (folder / CONVERSATION).write_text(text + "\n", encoding="utf-8")
    return Episode(result=result, usage=agent.conversation.usage)

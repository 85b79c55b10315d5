"""A policy's side of an episode as one stream of tokens: what is read, what was sampled, recorded.

Tool output is encoded alone, as plain text, and appended; sampled ids are never encoded again, so
every turn meets the stream by boundary rule 1. Knows nothing of sandboxes or of what tools do.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sandbox.base import InfraError
from t1jax.agent.tools import TOOLS, Reply, Said
from t1jax.config import AgentSection
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.completion import Complete, Completion, ContextFullError, Request
from t1jax.trajectory.record import Finish, RouteShape, Sampling
from t1jax.trajectory.recorder import Recorder

NO_ROUTES = RouteShape(layers=0, chosen=0, experts=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Who answers, and in which language."""

    complete: Complete
    chat: Chat
    shape: RouteShape = NO_ROUTES


class TokenConversation:
    """Appends to one recorder, turn after turn."""

    def __init__(
        self,
        policy: Policy,
        recorder: Recorder,
        limits: AgentSection,
        *,
        sampling: Sampling,
        session: str,
    ):
        self._policy, self._recorder, self._limits = policy, recorder, limits
        self._sampling, self._session = sampling, session
        self._last = 0  # the last id of the turn before
        self.seconds: Counter[str] = Counter()  # waited for the policy, and in its stages

    async def open(self, instruction: str) -> Said:
        """The first turn."""
        limits = self._limits
        system = [{"role": "system", "content": limits.system}] if limits.system else []
        messages = [*system, {"role": "user", "content": instruction}]
        tools = TOOLS if limits.list_tools else ()
        ids = self._policy.chat.opening(messages, tools=tools, thinking=limits.thinking)
        if len(ids) >= limits.context_tokens:  # kept all the same: a record needs its prompt
            self._recorder.append_context(ids)
        return await self._turn(ids)

    async def go_on(self, replies: Sequence[Reply]) -> Said:
        """The turn after these replies."""
        messages = [
            {"role": "user" if reply.remark else "tool", "content": reply.text} for reply in replies
        ]
        thinking = self._limits.thinking
        return await self._turn(
            self._policy.chat.following(messages, last=self._last, thinking=thinking)
        )

    async def _turn(self, given: np.ndarray) -> Said:
        limits, recorder = self._limits, self._recorder
        room = limits.context_tokens - len(recorder) - len(given)
        if room < 1:
            raise ContextFullError(
                f"{len(recorder)} tokens and {len(given)} new ones leave no room in a context of "
                f"{limits.context_tokens}"
            )
        recorder.append_context(given)
        request = Request(
            prompt=recorder.stream,
            max_tokens=min(limits.turn_tokens, room),
            sampling=self._sampling,
            stop_ids=self._policy.chat.ends,
            session=self._session,
        )
        begin = time.monotonic()
        answer = await self._policy.complete(request)
        self.seconds.update({"policy": time.monotonic() - begin, **answer.seconds})
        return self._said(answer)

    def _said(self, answer: Completion) -> Said:
        """Records an answer, then reads it."""
        recorder, chat = self._recorder, self._policy.chat
        if answer.finish is Finish.cancelled or len(answer.ids) == 0:
            raise InfraError(f"the policy gave up a turn after {len(answer.ids)} tokens")
        recorder.append_sampled(
            answer.ids, answer.logprobs, version=answer.version, finish=answer.finish
        )
        if answer.routes.size:
            recorder.record_routes(answer.first, answer.routes)
        self._last = int(answer.ids[-1])
        parsed = chat.parse(answer.ids, thinking=self._limits.thinking)
        return Said(
            calls=parsed.calls,
            errors=parsed.errors,
            cut=answer.finish is Finish.length,
        )

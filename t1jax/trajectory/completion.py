"""What an agent asks of a policy and what it gets: ids in, ids out, never text.

`Complete` is the whole of what rollouts know of an engine. Ours answers it through its scheduler;
a fake or another engine may too. A call that is cancelled gives its place back.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from t1jax.errors import UserError
from t1jax.trajectory.record import Finish, Sampling

PLAIN = Sampling()


class RequestError(UserError):
    """A request that no engine could answer: its message names the field and what is allowed."""


class ContextFullError(RequestError):
    """The prompt leaves no room for one more token in the engine's context."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One turn. Its answer depends on nothing else but the weights."""

    prompt: np.ndarray  # [N] int32: the whole stream so far, N >= 1
    max_tokens: int
    sampling: Sampling = PLAIN
    stop_ids: frozenset[int] = frozenset()  # any of them ends the answer, as its last token
    # Requests of one session continue each other: its last turn's cache is worth keeping.
    session: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The answer: M tokens, and the routes of what was read to make them."""

    ids: np.ndarray  # [M] int32, as sampled
    logprobs: np.ndarray  # [M] float32, raw: log softmax(logits / temperature)
    filtered_logprobs: np.ndarray  # [M] float32, renormalised over what top-k and top-p left
    # Of the stream prompt + ids: tokens first..N+M-2 were read, and these are their routes. What
    # lies before `first` came from a cache that an earlier turn of the session filled; its rows
    # were that turn's answer.
    first: int
    routes: np.ndarray  # [N+M-1-first, L, C], the smallest unsigned type
    version: int  # of the weights that sampled every one of the tokens
    finish: Finish
    seconds: Mapping[str, float]  # by stage: queue, prefill, decode


Complete = Callable[[Request], Awaitable[Completion]]

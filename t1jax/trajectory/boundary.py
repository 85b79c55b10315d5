"""Where a conversation that a client hands back meets the stream that was sampled.

The first rule that fits, for a stream T and a new prompt p:

1. strict: T is a prefix of p. The rest of p is appended.
2. normalised: p differs from T only in what formatting does at the ends of turns: of the context
   after the last completion at most 96 tokens are dropped; a completion may lack at most its last
   16 tokens in p, where p ends the turn. The sampled tokens stay, p's ending of the turn follows.
3. retokenised: a completion has the same text in p under other ids. The sampled ids stay, p's copy
   is skipped.
4. split: anything else was rewritten. A new chunk begins with p.

Several turns may differ in several ways; the boundary counts under the worst. Works on ids; what
they say, and which of them end a turn, is asked of a `Language`.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from t1jax.trajectory.record import Rule

TEMPLATE_TOKENS = 96
SAMPLED_TOKENS = 16


class Language(Protocol):
    """What the rules must know about ids. `chat.Chat` is one."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a message."""

    @property
    def start(self) -> int:
        """The token that begins a message."""

    def same_text(self, sampled: np.ndarray, copy: np.ndarray) -> bool:
        """Whether two encodings of a message, from its `start` on, say the same."""


class Boundary(NamedTuple):
    """Keep so many tokens of the stream, then append these (mask 0)."""

    rule: Rule
    keep: int
    append: np.ndarray


class _Turn(NamedTuple):
    """Positions in the stream: context begin..header-1, then a message whose end was sampled."""

    begin: int
    header: int
    sampled: int
    end: int


class _Match(NamedTuple):
    """How far a turn reaches in the prompt, and by which rule."""

    rule: Rule
    until: int


def meet(ids: np.ndarray, mask: np.ndarray, prompt: np.ndarray, language: Language) -> Boundary:
    """Decides which rule joins the prompt to the stream, and what the stream becomes."""
    if common_prefix(ids, prompt) == len(ids):
        return Boundary(Rule.strict, len(ids), prompt[len(ids) :])
    at, end, rules = 0, 0, [Rule.strict]
    for turn in _turns(ids, mask, language):
        match = _match(ids, turn, prompt, at, language)
        if match is None:
            return Boundary(Rule.split, 0, prompt)
        at, end = match.until, turn.end
        rules.append(match.rule)
    kept = common_prefix(ids[end:], prompt[at:])
    dropped = len(ids) - end - kept
    if dropped > TEMPLATE_TOKENS:
        return Boundary(Rule.split, 0, prompt)
    if dropped:
        rules.append(Rule.normalised)
    worst = max(rules, key=list(Rule).index)
    return Boundary(worst, end + kept, prompt[at + kept :])


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _turns(ids: np.ndarray, mask: np.ndarray, language: Language) -> Iterator[_Turn]:
    """The sampled runs of a stream, each with the header of its message."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    begin = 0
    for sampled, end in edges.reshape(-1, 2).tolist():
        starts = np.flatnonzero(ids[begin:sampled] == language.start)
        header = begin + int(starts[-1]) if len(starts) else sampled
        yield _Turn(begin, header, sampled, end)
        begin = end


def _match(
    ids: np.ndarray, turn: _Turn, prompt: np.ndarray, at: int, language: Language
) -> _Match | None:
    """Finds a turn in the prompt from position `at` on; None: it is not there."""
    context, message = ids[turn.begin : turn.header], ids[turn.header : turn.end]
    if common_prefix(context, prompt[at:]) < len(context):
        return None
    at += len(context)
    common = common_prefix(message, prompt[at:])
    if common == len(message):
        return _Match(Rule.strict, at + common)
    # The end that p gives the turn stands for the sampled one, where there is a sampled one.
    ended = int(message[-1]) in language.ends
    header = turn.sampled - turn.header
    cut = at + common
    if common >= max(header, len(message) - SAMPLED_TOKENS) and _ends(prompt, cut, language):
        return _Match(Rule.normalised, cut + ended)
    stop = next((i for i in range(at, len(prompt)) if _ends(prompt, i, language)), None)
    body = message[:-1] if ended else message
    if stop is not None and language.same_text(body, prompt[at:stop]):
        return _Match(Rule.retokenised, stop + ended)
    return None


def _ends(prompt: np.ndarray, at: int, language: Language) -> bool:
    return at < len(prompt) and int(prompt[at]) in language.ends

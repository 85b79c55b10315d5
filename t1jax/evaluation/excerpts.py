"""Three trajectories for people: one solved, one partial, one failed, as text with log-probs.

What a tool printed may be hostile or endless: every text leaves here cut to a length and without
control characters, and the page escapes it. Chosen by a rule, not by hand: the first of its kind in
the order of the results, of the last usual evaluation that has one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from t1jax.errors import UserError
from t1jax.evaluation.run_folder import EVALUATED, Evaluation, RunFolder
from t1jax.pipeline.trials import Played
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.io import load_trajectory
from t1jax.trajectory.record import Chunk, Turn
from t1jax.trajectory.show import LEVELS, spans, visible

TRAJECTORY = "trajectory"  # below a trial's directory
GIVEN_CHARACTERS = 900  # of each stretch of given text, from its two ends
SAMPLED_TOKENS = 320  # of each completion, its first ones
FIRST_TURNS, LAST_TURNS = 6, 2
NAMED = 3  # least expected tokens of a turn

LEVEL_NAMES = [f"≥ {least:g}" if np.isfinite(least) else "lower" for least, _ in LEVELS]

KINDS: dict[str, Callable[[Played], bool]] = {
    "solved": lambda played: played.solved is True,
    "partial": lambda played: played.solved is False and bool(played.fraction),
    "failed": lambda played: played.solved is False and played.fraction == 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """Text that was sampled at once. `level` counts LEVELS, from the most expected."""

    text: str
    logprob: float
    level: int
    sampled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """A turn: what the policy was given, and what it said."""

    number: int
    given: str
    tokens: Sequence[Token]
    left_out: int  # sampled tokens that are not shown
    mean: float | None
    least: Sequence[Token]
    finish: str
    boundary: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A trajectory of a kind, or why there is none."""

    kind: str
    absent: str = ""
    task: str = ""
    evaluation: str = ""
    attempt: int = 0
    outcome: str = ""
    passed: int | None = None
    total: int | None = None
    tokens: int = 0
    sampled: int = 0
    turns: int = 0
    exchanges: Sequence[Exchange] = ()
    rest: str = ""  # given after the last turn, never read


def excerpts(run: RunFolder) -> list[Excerpt]:
    """One of each kind."""
    chat = open_chat(run)
    return [_first(run, kind, fits, chat) for kind, fits in KINDS.items()]


def open_chat(run: RunFolder) -> Chat | None:
    """The run's tokenizer; None where it is gone, and then ids are shown."""
    checkpoint = run.config.get("model", {}).get("checkpoint", "")
    try:
        return Chat.load(checkpoint) if checkpoint else None
    except (UserError, OSError):
        return None


def _first(run: RunFolder, kind: str, fits: Callable[[Played], bool], chat: Chat | None) -> Excerpt:
    for name in reversed(EVALUATED):
        if name not in run.evaluations:
            continue
        evaluation = run.evaluations[name]
        folders = evaluation.trial_folders()
        for played in filter(fits, evaluation.results):
            folder = folders.get((played.task, played.attempt))
            if folder is not None and (folder / TRAJECTORY).is_dir():
                return _excerpt(
                    kind, evaluation, played, load_trajectory(folder / TRAJECTORY).chunks, chat
                )
    return Excerpt(kind=kind, absent=f"no finished evaluation has a {kind} trial with a trajectory")


def _excerpt(
    kind: str, evaluation: Evaluation, played: Played, chunks: Sequence[Chunk], chat: Chat | None
) -> Excerpt:
    turns = [(chunk, turn) for chunk in chunks for turn in chunk.turns]
    shown = [
        _exchange(number, chunk, turn, chat)
        for number, (chunk, turn) in enumerate(turns)
        if number < FIRST_TURNS or number >= len(turns) - LAST_TURNS
    ]
    last = chunks[-1]
    read = last.turns[-1].end if last.turns else 0
    return Excerpt(
        kind=kind,
        task=plain(played.task),
        evaluation=evaluation.name,
        attempt=played.attempt,
        outcome=played.outcome,
        passed=played.passed,
        total=played.total,
        tokens=sum(map(len, chunks)),
        sampled=sum(chunk.sampled_tokens for chunk in chunks),
        turns=len(turns),
        exchanges=shown,
        rest=_given(last.ids[read:], chat),
    )


def _exchange(number: int, chunk: Chunk, turn: Turn, chat: Chat | None) -> Exchange:
    end = min(turn.end, turn.sampled + SAMPLED_TOKENS)
    tokens = list(_tokens(chunk, dataclasses.replace(turn, end=end), chat))
    part = slice(turn.sampled, turn.end)
    logprobs = chunk.logprobs[part][chunk.mask[part]]
    sampled = sorted((t for t in tokens if t.sampled), key=lambda token: token.logprob)
    return Exchange(
        number=number,
        given=_given(chunk.ids[turn.begin : turn.sampled], chat),
        tokens=tokens,
        left_out=turn.end - end,
        mean=float(logprobs.mean()) if len(logprobs) else None,
        least=sampled[:NAMED],
        finish=str(turn.finish),
        boundary=turn.rule.value,
    )


def _tokens(chunk: Chunk, turn: Turn, chat: Chat | None) -> Iterator[Token]:
    for span in spans(chunk, turn, chat):
        level = next(n for n, (least, _) in enumerate(LEVELS) if span.logprob >= least)
        yield Token(text=plain(span.text), logprob=span.logprob, level=level, sampled=span.sampled)


def _given(ids: np.ndarray, chat: Chat | None) -> str:
    text = chat.decode(ids) if chat else " ".join(map(str, ids.tolist()))
    return cut(plain(text), GIVEN_CHARACTERS)


def plain(text: str) -> str:
    """Text that a page can hold: no control characters, no halves of surrogate pairs."""
    return visible(text).encode("utf-8", "replace").decode("utf-8")


def cut(text: str, most: int) -> str:
    """The two ends of a text that is too long, and how much lies between them."""
    if len(text) <= most:
        return text
    left = most // 2
    return f"{text[:left]} [… {len(text) - most:,} characters …] {text[-(most - left) :]}"

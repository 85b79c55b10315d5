"""`t1jax trajectory show`: a trajectory for people. Colours on a terminal, plain lines elsewhere.

What was given is dim, what was sampled is coloured by its log-prob. Control characters are shown,
never sent: a tool may have printed escape sequences. An unfinished trajectory is shown as far as it
was written. Reads only.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from t1jax.errors import UserError
from t1jax.trajectory import io
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import Chunk, Ending, Trajectory, Turn

# The least log-prob of each colour, and what it means.
LEVELS = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (-np.inf, "bold red"))
GIVEN = "dim"
WORST = 3  # tokens named per turn
CHARACTER_TOKENS = 4  # most tokens that one character can be cut into
PLAIN_WIDTH = 120
# Spelled out: C0, C1, line and paragraph separators, and what turns the direction of text.
CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for codes in ((0, 0x20), (0x7F, 0xA0), (0x2028, 0x202F), (0x2066, 0x206A))
    for code in range(*codes)
    if chr(code) not in "\n\t"
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What of a trajectory is shown."""

    first_turn: int = 0
    last_turn: int | None = None  # exclusive; None: to the end
    context_characters: int = 600  # of each stretch of given text, from its two ends

    @classmethod
    def parse(cls, turns: str, context_characters: int) -> "View":
        """Reads FIRST:LAST as Python slices do, without negative numbers."""
        first, colon, last = turns.partition(":")
        if turns and not (colon and all(part.isdigit() or not part for part in (first, last))):
            raise UserError(f"--turns {turns!r} is no range; write for example 0:3 or 10:")
        return cls(
            first_turn=int(first or 0),
            last_turn=int(last) if last else None,
            context_characters=context_characters,
        )


def show(
    path: str, *, tokenizer: str = "", turns: str = "", context_characters: int = 600,
    stream: TextIO | None = None,
) -> None:  # fmt: skip
    """Prints a trajectory.

    Args:
      path: a trajectory's directory, or the NAME.incomplete of one.
      tokenizer: a checkpoint directory or tokenizer.json; without it ids are shown.
      turns: FIRST:LAST, which turns' tokens to print; empty: all.
      context_characters: how much of each stretch of given text.
      stream: standard output if None.
    """
    view = View.parse(turns, context_characters)
    chat = Chat.load(tokenizer) if tokenizer else None
    trajectory = _read(Path(path))
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)
    _print_facts(console, trajectory)
    for number, chunk in enumerate(trajectory.chunks):
        if len(trajectory.chunks) > 1:
            console.rule(f"chunk {number}")
        console.print(_turn_table(chunk))
        if chunk.routes.size:
            console.print(_route_table(chunk))
        _print_stream(console, chunk, chat, view)


def _read(path: Path) -> Trajectory:
    if not (path / io.LOG).exists():
        return io.load_trajectory(path)
    unfinished = Ending(task=path.name, outcome="incomplete", reward=None)
    return io.recover(path).finish(unfinished)


def _print_facts(console: Console, trajectory: Trajectory) -> None:
    ending, chunks = trajectory.ending, trajectory.chunks
    table = Table.grid(padding=(0, 2))
    tokens, sampled = (
        sum(len(c) for c in chunks), sum(c.sampled_tokens for c in chunks)
    )  # fmt: skip
    rows = {
        "task": ending.task,
        "outcome": ending.outcome,
        "reward": "none: not graded" if ending.reward is None else f"{ending.reward:g}",
        "tokens": f"{tokens:,}, of them sampled {sampled:,} ({sampled / tokens:.1%})",
        "turns": f"{trajectory.turns} in {len(chunks)} chunk{'s' * (len(chunks) > 1)}",
        "boundaries": ", ".join(f"{rule} {n}" for rule, n in trajectory.boundaries.items()),
        "log-probs": f"{chunks[0].logprob_kind}, temperature {chunks[0].sampling.temperature:g}, "
        f"top-p {chunks[0].sampling.top_p:g}, top-k {chunks[0].sampling.top_k}",
        "weights": "version " + _span([int(c.versions[i]) for c in chunks for i in (0, -1)]),
        "seconds": ", ".join(f"{name} {value:.1f}" for name, value in ending.timings.items()),
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(visible(value)))
    console.print(table)


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _turn_table(chunk: Chunk) -> Table:
    table = Table(title="turns", title_justify="left")
    for name in ("turn", "given", "sampled", "boundary", "ended by", "version", "mean log-prob",
                 "lowest"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("boundary", "ended by") else "right")
    for number, turn in enumerate(chunk.turns):
        sampled = chunk.logprobs[turn.sampled : turn.end][chunk.mask[turn.sampled : turn.end]]
        mean, lowest = (sampled.mean(), sampled.min()) if len(sampled) else (np.nan, np.nan)
        table.add_row(
            str(number), f"{turn.sampled - turn.begin:,}", f"{turn.end - turn.sampled:,}",
            turn.rule.value, str(turn.finish), str(chunk.versions[max(turn.end - 1, 0)]),
            f"{mean:.3f}", Text(f"{lowest:.3f}", style=_style(float(lowest))),
        )  # fmt: skip
    return table


@dataclasses.dataclass(frozen=True)
class Load:
    """How a layer spread its tokens over experts."""

    used: int
    busiest: int
    share: float  # of all choices, the busiest expert's
    balance: float  # entropy over its maximum: 1 is even


def loads(chunk: Chunk) -> list[Load]:
    """Each layer's load, over the rows that were recorded."""
    experts, found = chunk.shape.experts, []
    for layer in range(chunk.shape.layers):
        chosen = chunk.routes[chunk.recorded, layer].reshape(-1)
        counts = np.bincount(chosen, minlength=experts)
        shares = counts / max(counts.sum(), 1)
        positive = shares[shares > 0]
        entropy = -(positive * np.log(positive)).sum() / max(np.log(experts), 1e-9)
        found.append(Load(len(positive), int(counts.argmax()), float(shares.max()), float(entropy)))
    return found


def _route_table(chunk: Chunk) -> Table:
    rows, missing = len(chunk.recorded), chunk.missing_rows
    title = (
        f"routes: {rows:,} rows of {chunk.shape.layers} layers x {chunk.shape.chosen} of "
        f"{chunk.shape.experts} experts, {missing:,} missing"
    )
    table = Table(title=title, title_justify="left")
    for name in ("layer", "experts used", "busiest", "its load / even", "balance"):
        table.add_column(name, justify="right")
    for layer, load in enumerate(loads(chunk)):
        excess = load.share * chunk.shape.experts
        table.add_row(
            str(layer), str(load.used), str(load.busiest), f"{excess:.2f}", f"{load.balance:.3f}"
        )
    return table


def _print_stream(console: Console, chunk: Chunk, chat: Chat | None, view: View) -> None:
    console.print(_legend())
    for number, turn in enumerate(chunk.turns):
        if number < view.first_turn or number >= (view.last_turn or len(chunk.turns)):
            continue
        _print_given(console, chunk, turn.begin, turn.sampled, chat, view, f"turn {number} given")
        _print_sampled(console, chunk, turn, chat, number)
    rest = chunk.turns[-1].end if chunk.turns else 0
    if rest < len(chunk) and view.last_turn is None:
        _print_given(console, chunk, rest, len(chunk), chat, view, "given, never read")


def _legend() -> Text:
    legend = Text("given ", style=GIVEN)
    for least, style in LEVELS:
        limit = f"≥ {least:g}" if np.isfinite(least) else "lower"
        legend.append(f" sampled {limit}", style=style)
    return legend


def _head(console: Console, what: str, begin: int, end: int, note: str = "") -> None:
    console.print(Text(f"── {what}: tokens {begin:,}..{end - 1:,}{note}", style="bold cyan"))


def _print_given(
    console: Console, chunk: Chunk, begin: int, end: int, chat: Chat | None, view: View, what: str
) -> None:
    if begin == end:
        return
    _head(console, what, begin, end)
    ids = chunk.ids[begin:end]
    text = visible(chat.decode(ids)) if chat else " ".join(map(str, ids.tolist()))
    most = view.context_characters
    if len(text) > most:
        left = most // 2
        cut = f" [… {len(text) - most:,} characters …] "
        text = text[:left] + cut + text[len(text) - (most - left) :]
    console.print(Text(text, style=GIVEN), soft_wrap=True)


def _print_sampled(
    console: Console, chunk: Chunk, turn: Turn, chat: Chat | None, number: int
) -> None:
    if turn.sampled == turn.end:
        return
    repeated = int((~chunk.mask[turn.sampled : turn.end]).sum())
    note = f", {repeated:,} of them trained in an earlier chunk" if repeated else ""
    _head(console, f"turn {number} sampled", turn.sampled, turn.end, note)
    told = list(spans(chunk, turn, chat))
    console.print(Text.assemble(*((s.text, s.style) for s in told)), soft_wrap=True)
    lowest = sorted((s for s in told if s.sampled), key=lambda s: s.logprob)[:WORST]
    named = ", ".join(f"{s.text!r} {s.logprob:.2f} at {s.at:,}" for s in lowest)
    console.print(Text(f"   least expected: {named}", style=GIVEN), soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens that print together: one, or those of a character that was cut."""

    text: str
    at: int
    logprob: float  # the lowest
    sampled: bool

    @property
    def style(self) -> str:
        return _style(self.logprob) if self.sampled else GIVEN


def spans(chunk: Chunk, turn: Turn, chat: Chat | None) -> Iterator[Span]:
    """What a turn's completion is printed as; ids where there is no chat."""
    at = turn.sampled
    while at < turn.end:
        count = _printable(chunk.ids[at : turn.end], chat) if chat else 1
        part = slice(at, at + count)
        text = visible(chat.decode(chunk.ids[part])) if chat else f" {chunk.ids[at]}"
        yield Span(text, at, float(chunk.logprobs[part].min()), bool(chunk.mask[part].any()))
        at += count


def _printable(ids: np.ndarray, chat: Chat) -> int:
    """The fewest tokens that are whole characters; 1 where none are."""
    for count in range(1, min(CHARACTER_TOKENS, len(ids)) + 1):
        if "\ufffd" not in chat.decode(ids[:count]):
            return count
    return 1


def _style(logprob: float) -> str:
    return next((style for least, style in LEVELS if logprob >= least), GIVEN)


def visible(text: str) -> str:
    """Text without control characters but line breaks and tabs: a terminal would obey them."""
    return text.translate(CONTROLS)

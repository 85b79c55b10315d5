"""Tokens done and their rate on stderr: a bar on a terminal, else a line every few seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress(total: int, every_s: float = 5.0) -> Iterator[Callable[[int], None]]:
    """Tokens done and their rate on stderr: a bar on a terminal, else a line every few seconds."""
    started_s = shown_s = time.monotonic()
    done = 0
    rate = lambda: f"{done / max(time.monotonic() - started_s, 1e-9):,.0f} tokens/s"  # noqa: E731
    columns = (TextColumn("score"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    on_terminal = sys.stderr.isatty()
    bars = Progress(*columns, console=Console(file=sys.stderr), disable=not on_terminal)
    task = bars.add_task("score", total=total, rate="")

    def advance(tokens: int) -> None:
        nonlocal done, shown_s
        done += tokens
        bars.update(task, completed=done, rate=rate())
        if not on_terminal and time.monotonic() - shown_s >= every_s:
            shown_s = time.monotonic()
            print(f"score: {done:,} of {total:,} tokens, {rate()}", file=sys.stderr, flush=True)

    with bars:
        yield advance

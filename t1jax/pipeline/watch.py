"""What a person sees while trials run: running, finished, tokens a second, mean reward so far.

A bar on a terminal, a plain line every few seconds elsewhere, always on stderr. Counts what it is
told; knows nothing of trials.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sandbox.verify import UNGRADED, Outcome


class Watch:
    """The state of many trials; `finished` and `sampled` are called as things happen."""

    def __init__(
        self, what: str, total: int, *, stream: TextIO | None = None, every_s: float = 5.0
    ):
        self._what, self._total = what, total
        self._stream = sys.stderr if stream is None else stream
        self._every_s = every_s
        self._began_s = self._shown_s = time.monotonic()
        self._running = self._sampled = self._resumed = 0
        self._outcomes: Counter[str] = Counter()
        self._rewards = (0, 0.0)  # how many, their sum
        self._bars: Progress | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bars = Progress(*columns, console=Console(file=self._stream))
            self._bars.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        else:
            print(self.line(), file=self._stream, flush=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one trial."""
        self._running += 1
        self._show()
        try:
            yield
        finally:
            self._running -= 1

    def sampled(self, tokens: int) -> None:
        """Counts a turn's tokens."""
        self._sampled += tokens
        self._show()

    def finished(self, outcome: str, reward: float | None, *, resumed: bool = False) -> None:
        """Counts a trial that ended, or that an earlier run had finished."""
        self._outcomes[outcome] += 1
        self._resumed += resumed
        if reward is not None:
            number, total = self._rewards
            self._rewards = (number + 1, total + reward)
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[0])
        self._show()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def tokens_per_s(self) -> float:
        return self._sampled / max(self.seconds, 1e-9)

    def line(self) -> str:
        """All of it, in words."""
        number, total = self._rewards
        broken = sum(self._outcomes[outcome] for outcome in UNGRADED)
        parts = [
            f"{self._what}: {self._outcomes.total()} of {self._total} finished",
            *([f"{self._resumed} of them earlier"] if self._resumed else []),
            f"{self._running} running",
            f"{self.tokens_per_s:.0f} tokens/s",
            f"mean reward {total / number:.3f}" if number else "no reward yet",
            f"{self._outcomes[Outcome.solved]} solved",
            *([f"{broken} infrastructure errors"] if broken else []),
            f"{self.seconds:.1f} s",
        ]
        return ", ".join(parts)

    def _show(self) -> None:
        if self._bars is not None:
            _, _, rest = self.line().partition("finished, ")
            self._bars.update(self._bars.task_ids[0], description=f"{self._what}: {rest}")
        elif time.monotonic() - self._shown_s >= self._every_s:
            self._shown_s = time.monotonic()
            print(self.line(), file=self._stream, flush=True)

"""One view of a run: its stages with their state and seconds, and what the running one says.

On a terminal a table that stays at the bottom, the last lines of the running stage in it; elsewhere
plain lines on stderr. Stages write to stderr and stdout as they do alone, and find no terminal
there: they print lines, which the view shows. Knows nothing of what stages do.
"""

import contextlib
import io
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

LINES = 8  # of the running stage that a terminal shows
SHOWN_A_S = 4  # how often a terminal is drawn
MARKS = {"waiting": ("·", "dim"), "running": ("▶", "bold cyan"), "done": ("✓", "green"),
         "earlier": ("✓", "dim green"), "failed": ("✗", "bold red")}  # fmt: skip


class View:
    """Shows the stages of a run for the length of a block."""

    def __init__(
        self, stages: Sequence[str], done: Mapping[str, float], *, stream: TextIO | None = None
    ):
        self._stream = sys.stderr if stream is None else stream
        self._states = {name: "earlier" if name in done else "waiting" for name in stages}
        self._seconds = dict(done)
        self._lines: deque[str] = deque(maxlen=LINES)
        self._running, self._began_s = "", 0.0
        self._live: Live | None = None
        self._console = Console(file=self._stream)
        if self._stream.isatty():
            self._live = Live(
                console=self._console, get_renderable=self._drawn, refresh_per_second=SHOWN_A_S,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        for name, seconds in self._seconds.items():
            self._say(f"stage {name}: done earlier, {seconds:.1f} s")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Around one stage; takes over what it prints."""
        number = list(self._states).index(name) + 1
        self._say(f"stage {name} ({number} of {len(self._states)})")
        self._states[name], self._running, self._began_s = "running", name, time.monotonic()
        self._lines.clear()
        try:
            with self._captured():
                yield
        except BaseException:
            self._ended("failed")
            raise
        self._ended("done")
        self._say(f"stage {name}: done, {self._seconds[name]:.1f} s")

    def _ended(self, state: str) -> None:
        self._states[self._running] = state
        self._seconds[self._running] = time.monotonic() - self._began_s
        self._running = ""

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        """On a terminal the stage's lines go into the view."""
        if self._live is None:
            yield
            return
        lines = _Lines(self._lines)
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
            yield

    def _say(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._stream, flush=True)

    # ---- a terminal ----

    def _drawn(self) -> Group:
        table = Table.grid(padding=(0, 1))
        for name in self._near(self._console.height - LINES - 1):
            mark, style = MARKS[self._states[name]]
            table.add_row(Text(mark, style), Text(name, style), Text(self._time(name), style))
        lines = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in self._lines]
        return Group(table, *lines)

    def _near(self, rows: int) -> list[str]:
        """As many stages as a terminal has rows for, the running one in the middle."""
        names = list(self._states)
        at = names.index(self._running) if self._running else len(names)
        first = max(min(at - rows // 2, len(names) - rows), 0)
        return names[first : first + max(rows, 1)]

    def _time(self, name: str) -> str:
        seconds = self._seconds.get(name)
        if name == self._running:
            seconds = time.monotonic() - self._began_s
        return "" if seconds is None else f"{seconds:.0f} s"


class _Lines(io.TextIOBase):
    """A stream that is no terminal and keeps the last lines."""

    def __init__(self, lines: deque[str]):
        self._kept, self._part = lines, ""

    def write(self, text: str) -> int:
        *whole, self._part = (self._part + text).split("\n")
        self._kept.extend(line for line in whole if line.strip())
        return len(text)

    def writable(self) -> bool:
        return True

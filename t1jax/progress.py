"""Progress of long work on stderr: a bar on a terminal, a plain line every few seconds elsewhere.

    with Progress() as progress:
        progress.start("convert", total_bytes)
        for name, array in tensors:
            write(name, array)
            progress.advance(array.nbytes)

Counts bytes and nothing else. Standard output is left to results.
"""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich import filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """Shows one piece of work at a time; `start` ends the one before."""

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 5.0):
        self._stream = sys.stderr if stream is None else stream
        self._every_s = every_s
        self._bars = _bars(self._stream) if self._stream.isatty() else None
        self._what = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._started_s = 0.0
        self._shown_s = 0.0

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
        if error is None:
            self._finish()
        if self._bars is not None:
            self._bars.stop()

    def start(self, what: str, total_bytes: int) -> None:
        """Begins a piece of work of this many bytes."""
        self._finish()
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._started_s = self._shown_s = time.monotonic()
        if self._bars is not None:
            for task in self._bars.task_ids:
                self._bars.stop_task(task)
            self._bars.add_task(what, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Counts bytes that were dealt with since the last call."""
        self._done_bytes += done_bytes
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[-1], done_bytes)
        elif time.monotonic() - self._shown_s >= self._every_s:
            self._shown_s = time.monotonic()
            self._print(f"{_size(self._done_bytes)} of {_size(self._total_bytes)}")

    def note(self, line: str) -> None:
        """Prints a line of its own, above the bar where there is one."""
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def _finish(self) -> None:
        if self._what and self._bars is None:
            self._print(f"{_size(self._done_bytes)} done")
        self._what = ""

    def _print(self, amount: str) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rate = _size(int(self._done_bytes / elapsed_s))
        line = f"{self._what}: {amount}, {rate}/s, {elapsed_s:.1f} s"
        print(line, file=self._stream, flush=True)


def _size(count_bytes: int) -> str:
    return filesize.decimal(count_bytes)


def _bars(stream: TextIO) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )

"""What stops a run before it wastes a night: steps that are not finite, stages that stand still.

Knows nothing of models. The disk is watched where things are saved (checkpoint/train_state).
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from t1jax.errors import FAILED, UserError

LAST_WORDS_S = 30.0  # from the failure of a stage that stands still to the end of the process


class SkipGuard:
    """Counts steps that changed nothing because a loss or gradient was not finite."""

    def __init__(self, limit: int, folder: Path):
        self._limit, self._folder = limit, folder
        self.total = self.in_a_row = 0

    def count(self, step: int, skipped: bool, dump: Callable[[Path], None]) -> None:
        """Takes in one step.

        Args:
          step: its number.
          skipped: whether it changed nothing.
          dump: writes the step's batch into a directory.

        Raises:
          UserError: so many in a row were skipped; names the dump of the last one's batch.
        """
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row < self._limit:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        dump(self._folder)
        raise UserError(
            f"step {step} and the {self.in_a_row - 1} before it were skipped: their losses or "
            f"gradients are not finite. The weights are those before them; the last batch is in "
            f"{self._folder}. Lower the learning rate, or look for NaN in the batch"
        )


class StalledError(UserError):
    """A stage made no progress for too long."""


class Watchdog:
    """Fails the process when nothing beats for `seconds`, with every thread's stack in a file.

    The main thread gets an exception; where it does not take it (it waits in a device's run-time),
    the process ends some time later all the same.
    """

    def __init__(self, seconds: float, folder: Path, *, last_words_s: float = LAST_WORDS_S):
        self._seconds, self._folder, self._last_words_s = seconds, folder, last_words_s
        self._stage, self._beaten_s = "start", time.monotonic()
        self._ended = threading.Event()
        self._message = ""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._before: signal._HANDLER = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._fail)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            signal.signal(signal.SIGUSR1, self._before)

    def beat(self, stage: str) -> None:
        """Says that there is progress, in this stage."""
        self._stage, self._beaten_s = stage, time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(min(self._seconds / 4, 5.0)):
            if time.monotonic() - self._beaten_s > self._seconds:
                self._dump()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                if not self._ended.wait(self._last_words_s):
                    print(f"error: {self._message}", file=sys.stderr, flush=True)
                    os._exit(FAILED)
                return

    def _dump(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "stacks.txt"
        with file.open("w") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
        self._message = (
            f"{self._stage} made no progress for guards.stalled_seconds={self._seconds:g}; every "
            f"thread's stack is in {file}"
        )

    def _fail(self, number: int, frame: FrameType | None) -> None:
        raise StalledError(self._message)

"""A signal asks a stage to stop at its next safe place: it saves, and the command ends with 75.

    with asked_by_signals() as stop:
        rollout = await stop.unless(collect(...))     # cancelled when a signal comes
        if stop.asked: ...                            # between steps

The first SIGTERM or Ctrl-C asks; a second one ends the process at once. Knows nothing of stages.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from t1jax.interrupts import SIGNALS, Interrupted

Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818 - no error: the caller saves and ends
    """What was awaited was cancelled, because a signal came."""


class Stop:
    """Whether somebody asked."""

    def __init__(self) -> None:
        self.asked = False
        self.number = signal.SIGTERM  # the signal that asked
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def ask(self) -> None:
        """Asks; from any thread."""
        self.asked = True
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    async def unless(self, work: Awaitable[Result]) -> Result:
        """The result of `work`; where somebody asks before, it is cancelled.

        Raises:
          Stopped: after `work` has cleaned up.
        """
        task, event = asyncio.ensure_future(work), asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        self._waiting.append(entry)
        if self.asked:
            event.set()
        asked = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            await cancel(task)
            raise Stopped
        finally:
            self._waiting.remove(entry)
            asked.cancel()
            if not task.done():
                await cancel(task)


async def cancel(task: "asyncio.Future[Result]") -> None:
    """Cancels and waits for the end of the clean-up."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost


@contextmanager
def asked_by_signals() -> Iterator[Stop]:
    """Within the block signals ask. Elsewhere than in the main thread: nothing does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise Interrupted(number)
        stop.number = signal.Signals(number)
        stop.ask()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

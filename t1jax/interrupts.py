"""Ctrl-C and SIGTERM end a command by an exception, so that what it was writing is cleaned up.

Python raises a signal's exception wherever the main thread happens to be. Inside a callback of the
garbage collector it is printed and lost (jax registers one, which runs often while it traces), and
inside an import it aborts the process or turns into an ImportError of the extension that was being
loaded. An event loop that was left half made complains when it is collected. In all of these the
signal is sent again a little later.
"""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.05
UNSAFE_FUNCTIONS = ("_xla_gc_callback", "__del__", "new_event_loop")
UNSAFE_FILES = "<frozen importlib"


class Interrupted(SystemExit):
    """A signal asked the command to end. The status is 128 + its number, as shells report it.

    A SystemExit, because typer makes its own silent ending of a KeyboardInterrupt.
    """

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def raised_on_signals() -> Iterator[None]:
    """Within the block both signals raise Interrupted. Elsewhere than in the main thread: nothing.

    Only there can Python set handlers, and only there do they run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    if _would_be_lost(frame):
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    # A coroutine that was just made is thrown away with everything else: nothing to tell the user.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    raise Interrupted(number)


def _would_be_lost(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in UNSAFE_FUNCTIONS or code.co_filename.startswith(UNSAFE_FILES):
            return True
        frame = frame.f_back
    return False

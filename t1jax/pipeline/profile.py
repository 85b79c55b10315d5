"""Where the time goes: seconds by part of a step, and `--profile`, a trace of one."""

import contextlib
import time
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def profiled(folder: str) -> Iterator[None]:
    """Writes jax.profiler's trace of the block into a directory; an empty name: no trace."""
    if not folder:
        yield
        return
    with jax.profiler.trace(folder):
        yield


class Clock:
    """Seconds between laps, and of named parts of one."""

    def __init__(self) -> None:
        self._lap_s = time.monotonic()
        self.parts: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began_s

    def lap(self) -> float:
        """Seconds since the last lap; parts begin anew."""
        now_s = time.monotonic()
        seconds, self._lap_s = now_s - self._lap_s, now_s
        self.parts = {}
        return seconds

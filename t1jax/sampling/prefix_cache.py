"""What sessions left behind: streams that were read, kept on the device for the next turn.

A recurrent state cannot be cropped, so a stream helps only a prompt that begins with exactly its
tokens: the longest such one of the session is taken. Least recently used ones go first when the
bytes are too many; what is gone is read again. All are of one weight version.
Knows nothing of how a stream is read or decoded.
"""

import collections
import dataclasses

import numpy as np

from t1jax.sampling.engine import Prefix


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A kept stream; `tokens` include the last one, which was not read."""

    session: str
    tokens: np.ndarray  # [N] int32
    prefix: Prefix
    size_bytes: int


class PrefixCache:
    """Entries in order of use, the oldest first."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: collections.OrderedDict[tuple[str, int], Entry] = collections.OrderedDict()
        self._lengths: dict[str, list[int]] = {}  # of each session, rising
        self.size_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, session: str, prompt: np.ndarray) -> Entry | None:
        """The session's longest stream that the prompt begins with, now the last to go."""
        for length in reversed(self._lengths.get(session, [])):
            entry = self._entries[session, length]
            if length <= len(prompt) and np.array_equal(entry.tokens, prompt[:length]):
                self._entries.move_to_end((session, length))
                return entry
        return None

    def keep(self, entry: Entry) -> None:
        """Keeps a stream in place of those of its session that it continues or repeats.

        One that is larger than the whole budget is not kept.
        """
        for length in list(self._lengths.get(entry.session, [])):
            old = self._entries[entry.session, length].tokens
            if length <= len(entry.tokens) and (
                length == len(entry.tokens) or np.array_equal(old, entry.tokens[:length])
            ):
                self._remove((entry.session, length))
        key = entry.session, len(entry.tokens)
        self._entries[key] = entry
        self._lengths[entry.session] = sorted([*self._lengths.get(entry.session, []), key[1]])
        self.size_bytes += entry.size_bytes
        while self.size_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
            self.evictions += 1

    def forget(self, session: str) -> None:
        """Drops what a session that will not go on has left."""
        for length in list(self._lengths.get(session, [])):
            self._remove((session, length))

    def clear(self) -> None:
        """Forgets everything: the weights are others now."""
        self._entries.clear()
        self._lengths.clear()
        self.size_bytes = 0

    def _remove(self, key: tuple[str, int]) -> None:
        entry = self._entries.pop(key)
        self.size_bytes -= entry.size_bytes
        self._lengths[key[0]].remove(key[1])
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]

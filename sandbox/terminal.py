"""A terminal inside a sandbox: keystrokes in, screen out, for harnesses that type (Terminus-2).

tmux runs in a session of its own, so the agent's shell and its terminal do not wait for each other.
Not covered: colours, the mouse, and what scrolled away while nobody looked beyond `HISTORY_LINES`.
"""

import asyncio
import shlex
from typing import Self

from sandbox.base import Sandbox, SandboxBrokenError

WIDTH, HEIGHT = 160, 40
HISTORY_LINES = 50_000
CALL_TIMEOUT_S = 30.0
SOCKET = "/tmp/.t1jax-terminal"


class Terminal:
    """One tmux pane."""

    def __init__(self, box: Sandbox, *, width: int = WIDTH, height: int = HEIGHT, user: str = ""):
        self._box = box
        self._size = (width, height)
        self._user = user
        self._seen = ""

    async def start(self) -> Self:
        """Opens the pane with a login shell in it."""
        width, height = self._size
        await self._tmux(
            rf"start-server \; set-option -g history-limit {HISTORY_LINES} \; "
            f"new-session -d -s main -x {width} -y {height} 'exec bash --login'"
        )
        return self

    async def type(self, *keys: str, wait_s: float = 0.0) -> None:
        """Types text verbatim, newlines as Enter, or a key by its tmux name: "C-c", "Up".

        Waits `wait_s` afterwards, which is how long the model gives its command.
        """
        for key in keys:
            named = not key.endswith("\n") and key in NAMED_KEYS
            literal = "" if named else "-l "
            for chunk in _chunks(key):
                await self._tmux(f"send-keys -t main {literal}-- {shlex.quote(chunk)}")
        await asyncio.sleep(wait_s)

    async def screen(self) -> str:
        """What the pane shows now."""
        return (await self._tmux("capture-pane -p -t main")).rstrip("\n") + "\n"

    async def new_output(self) -> str:
        """What was printed since the last call; the whole screen where that cannot be told."""
        whole = (await self._tmux("capture-pane -p -S - -t main")).rstrip("\n") + "\n"
        seen, self._seen = self._seen, whole.rstrip("\n")
        return whole[len(seen) :] if whole.startswith(seen) else await self.screen()

    async def _tmux(self, command: str) -> str:
        done = await self._box.exec(
            f"env -u TMUX TERM=xterm-256color tmux -f /dev/null -S {SOCKET} {command}",
            timeout_s=CALL_TIMEOUT_S, session="terminal", user=self._user,
        )  # fmt: skip
        if done.exit_code != 0:
            raise SandboxBrokenError(f"{self._box.name}: tmux: {done.output.strip()[-300:]}")
        return done.output


def _chunks(keys: str) -> list[str]:
    """tmux takes a command of 16 KB at most."""
    size = 2000
    chunks = [keys[at : at + size] for at in range(0, len(keys), size)]
    return [c[:-1] + r"\;" if c.endswith(";") else c for c in chunks]  # else it ends the command


NAMED_KEYS = frozenset(
    [*(f"C-{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), *(f"M-{c}" for c in "bdf")]
    + ["Enter", "Escape", "Tab", "BTab", "Space", "BSpace", "DC", "IC"]
    + ["Up", "Down", "Left", "Right", "Home", "End", "PPage", "NPage"]
    + [f"F{number}" for number in range(1, 13)]
)

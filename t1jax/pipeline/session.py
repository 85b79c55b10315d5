"""One stage's run around its loop: saved states, metrics, guards, signals.

    with session(setup, "sft", total=..., shown=...) as stage:
        found = stage.restore(abstract)
        stage.begin(start)
        for step in range(start, total):
            ...
            stage.told(step, row, skipped=..., dump=...)
            stage.done(step + 1, trees, score=...)        # saves when due; Preempted when asked

Knows nothing of what the stage trains.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from t1jax.checkpoint.train_state import Restored, TrainStates
from t1jax.errors import Preempted
from t1jax.pipeline.guards import SkipGuard, Watchdog
from t1jax.pipeline.learning import Setup, open_states
from t1jax.pipeline.metrics import Metrics, Row
from t1jax.pipeline.stop import Stop, asked_by_signals


class Session:
    """See the module. Made by `session`."""

    def __init__(
        self, setup: Setup, stage: str, total: int, shown: Sequence[str], states: TrainStates,
        stop: Stop, watchdog: Watchdog, exits: contextlib.ExitStack,
    ):  # fmt: skip
        self.stage, self.total, self.stop, self.watchdog = stage, total, stop, watchdog
        self._setup, self._states, self._shown, self._exits = setup, states, shown, exits
        self._dumps = setup.folder / "dumps" / stage
        self._skips = SkipGuard(setup.config.guards.skipped_in_a_row, self._dumps)
        self._metrics: Metrics | None = None

    def restore(self, abstract: Mapping[str, Any]) -> Restored | None:
        """The last saved state, if there is one."""
        found = self._states.restore(abstract)
        if found is not None:
            self._skips.total = found.facts["skipped_total"]
            self._skips.in_a_row = found.facts["skipped_in_a_row"]
        return found

    def begin(self, start: int, note: str = "") -> None:
        """Opens the metrics at the first step to come."""
        metrics = Metrics(
            self._setup.folder, self.stage, start=start, steps=self.total, shown=self._shown,
            writes=jax.process_index() == 0,
        )  # fmt: skip
        self._metrics = self._exits.enter_context(metrics)
        metrics.note(f"steps {start}..{self.total}{note}")

    def told(self, step: int, row: Row, *, skipped: bool, dump: Callable[[Path], None]) -> None:
        """Takes in a step's numbers.

        Raises:
          UserError: too many steps in a row were not finite.
        """
        assert self._metrics is not None
        self.watchdog.beat(f"{self.stage}, after step {step}")
        self._skips.count(step, skipped, dump)
        self._metrics.write(step, {**row, "skipped_total": float(self._skips.total)})

    def done(
        self, step: int, trees: Mapping[str, Any], facts: Mapping[str, Any], score: float | None
    ) -> None:
        """Saves after `step` steps where that is due, or somebody asked to stop.

        Raises:
          Preempted: somebody did, and there is more to do.
        """
        every = self._setup.config.checkpoints.every_steps
        if self.stop.asked or step == self.total or step % every == 0:
            self.save(step, trees, facts, score)
        if self.stop.asked and step < self.total:
            raise self.preempted(step)

    def save(
        self,
        step: int,
        trees: Mapping[str, Any],
        facts: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Saves the state after `step` steps, unless that is saved already."""
        if self._states.latest == step:
            return
        counts = {
            "skipped_total": self._skips.total,
            "skipped_in_a_row": self._skips.in_a_row,
        }
        self._states.save(step, trees, {**facts, **counts}, score=score)

    def preempted(self, step: int) -> Preempted:
        """Waits for what is being saved; the exception that ends the command."""
        self._states.wait()
        ended = Preempted(
            f"a signal came; {self.stage} is saved after step {step} of {self.total}: run the "
            "same command again to go on"
        )
        ended.number = self.stop.number
        return ended


@contextlib.contextmanager
def session(setup: Setup, stage: str, *, total: int, shown: Sequence[str]) -> Iterator[Session]:
    """Opens all that a stage's run needs, and closes it whatever happens."""
    config = setup.config
    watchdog = Watchdog(config.guards.stalled_seconds, setup.folder / "dumps" / stage)
    with contextlib.ExitStack() as exits:
        stop = exits.enter_context(asked_by_signals())
        states = exits.enter_context(open_states(config, stage))
        exits.enter_context(watchdog)
        yield Session(setup, stage, total, shown, states, stop, watchdog, exits)

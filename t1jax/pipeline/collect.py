"""What training asks of rollouts: trajectories of one step, and where new weights go.

The seam between the learning side and whatever plays episodes. Training sees a `Collect` and a
`Publish` and nothing of engines, agents or sandboxes; a synthetic task needs none of them.
"""

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from sandbox.task import Task
from t1jax.model.qwen3_5 import Params
from t1jax.trajectory.record import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The trajectories that a step trains on, and what became of the other trials."""

    # Graded ones only, at most as many as the step wants, in the order of `tasks`: not in the order
    # in which they finished.
    trajectories: tuple[Trajectory, ...]
    # Numbers of trials by what happened, such as launched, cancelled, infra_error,
    # cancelled/FAMILY. They become metrics named rollout/NAME.
    counts: Mapping[str, float]


class Collect(Protocol):
    """Plays one step's trials.

    Starts a trial for each entry of `tasks` (a task that stands there twice is attempted twice),
    returns when `wanted` of them are graded, and cancels the rest. Cancelling the call removes
    every sandbox it made. Asked for a step and version that it has finished trials of on disk, it
    takes those instead of playing them again: a killed run goes on with the same episodes.
    """

    def __call__(
        self, step: int, version: int, tasks: Sequence[Task], *, wanted: int
    ) -> Awaitable[Rollout]:
        """See the class. `version` is that of the weights published last."""
        ...


class Publish(Protocol):
    """Gives new weights to the engine, which serves no request across two versions.

    The tree belongs to the engine from then on; training never changes it.
    """

    def __call__(self, params: Params, version: int) -> Awaitable[None]:
        """Returns when the next request will be answered by these weights."""
        ...

"""What one call of `generate` returns: the contract's ResultTokens, with log-probs and routes.

Importing this imports google-jetstream, and with it TensorFlow (seconds): only `engine` does.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct
from jetstream.engine.engine_api import ResultTokens, SlotData

from t1jax.sampling.programs import Step


@struct.dataclass
class Slot(SlotData):
    """One slot's part of a Result; `tokens` and `valid` [1, steps], `lengths` [1]."""

    raw_logprob: Any = None  # float32 [1, steps]
    filtered_logprob: Any = None  # float32 [1, steps]
    routes: Any = None  # [1, steps, L, C]


@struct.dataclass
class Result(ResultTokens):
    """Tokens of every slot, of one or several steps. See `sampler` for the two log-probs.

    `data` is [B, 2 * steps + 1]: tokens, validity, and how many the slot has sampled so far.
    `routes` are those of the token that was READ to sample this one: of the one before it.
    """

    raw_logprob: Any = None  # float32 [B, steps]
    filtered_logprob: Any = None  # float32 [B, steps]
    routes: Any = None  # [B, steps, L, C], smallest unsigned dtype; L = 0 where not captured

    @property
    def extras(self) -> tuple[Any, Any, Any]:
        return self.raw_logprob, self.filtered_logprob, self.routes

    def copy_to_host_async(self) -> None:
        """Begins the copies of all fields."""
        for array in (self.data, *self.extras):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

    def convert_to_numpy(self) -> "Result":
        """The same on the host; waits."""
        data, *extras = map(np.asarray, (self.data, *self.extras))
        replace: Any = dataclasses.replace  # the base class ships no types
        return replace(self, data=data, **dict(zip(EXTRAS, extras, strict=True)))

    def get_result_at_slot(self, slot: int) -> Slot:
        """One slot's part."""
        return self.get_result_at_slots([slot])

    def get_result_at_slots(self, slots: list[int]) -> Slot:
        """Several slots' parts, one row each."""
        rows = np.asarray(slots)
        part = lambda bounds: self.data[rows, bounds[0] : bounds[1]]  # noqa: E731
        extras = {name: x[rows] for name, x in zip(EXTRAS, self.extras, strict=True)}
        return Slot(
            part(self.tokens_idx), part(self.valid_idx), part(self.length_idx)[:, 0], **extras
        )


EXTRAS = ("raw_logprob", "filtered_logprob", "routes")


def make_result(step: Step, steps: int) -> Result:
    """A Result of `steps` steps, whose columns lie as the class says."""
    return Result(
        data=step.packed_BT, tokens_idx=(0, steps), valid_idx=(steps, 2 * steps),
        length_idx=(2 * steps, 2 * steps + 1), samples_per_slot=1,
        raw_logprob=step.raw_logprob_BT, filtered_logprob=step.filtered_logprob_BT,
        routes=step.routes_BTLC,
    )  # fmt: skip

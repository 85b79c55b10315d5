"""What the steps take: batches, routes, and all that is known per token, with their placement.

Owns the column convention of the device's side (see `Batch`). The packing (t1jax/data, which never
sees jax) makes the same fields in numpy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t1jax.model.moe import Plan, Replay
from t1jax.model.sharding import RULES, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed episodes, [B, T]. The one shift to next-token form is the packing's, and done here:

    column t has token t of an episode as input, and what follows it as `targets_BT`. Everything
    else in column t (mask, log-probs, values, rewards, advantages) is about that target; routes
    are those of the input. An episode's last token has no target: 0 there, and the mask is False.
    """

    tokens_BT: jax.Array  # int32 inputs
    targets_BT: jax.Array  # int32: the next token of the same episode
    positions_BT: jax.Array  # int32, from 0 in each episode
    segments_BT: jax.Array  # int32: the row's episodes are 1, 2, ...; 0 is padding
    mask_BT: jax.Array  # bool: the policy sampled the target, and it counts


class Routes(NamedTuple):
    """Recorded routes of a batch, and (or None) the dispatch plans worked out from them."""

    replay: Replay  # stacked over layers: ids [L, B, T, C]
    plans: Plan | None = None


class SftInputs(NamedTuple):
    """A micro-batch of supervised fine-tuning. The model routes freely."""

    batch: Batch


class CriticInputs(NamedTuple):
    """A micro-batch for the critic. No routes: it did not generate the tokens."""

    batch: Batch
    old_values_BT: jax.Array  # before this update
    returns_BT: jax.Array


class ActorInputs(NamedTuple):
    """A micro-batch of PPO for the policy."""

    batch: Batch
    routes: Routes | None
    # The trainer's under the rollout's weights and these routes; never the sampler's. None: this
    # very pass's own, which at staleness 0 and one update per batch is the same, exactly.
    old_logprobs_BT: jax.Array | None
    advantages_BT: jax.Array
    weights_BT: jax.Array | None = None  # importance weights, if any
    reference_logprobs_BT: jax.Array | None = None  # with a KL coefficient


def shardings(inputs: Any, mesh: Mesh) -> Any:
    """Where each array of a Batch, Routes or step's inputs goes, in the same tree.

    For `jax.device_put` in one process, `jax.make_array_from_process_local_data` in several.
    """
    tokens = NamedSharding(mesh, spec("rows", "positions"))
    is_routes = lambda x: isinstance(x, Routes)  # noqa: E731
    return jax.tree.map(
        lambda x: _route_shardings(x, mesh) if is_routes(x) else tokens, inputs, is_leaf=is_routes
    )


def _route_shardings(routes: Routes, mesh: Mesh) -> Any:
    layers = (None, "rows", "positions")
    shards = PartitionSpec(None, (*RULES["rows"], *RULES["positions"]))
    recorded = None
    if routes.replay.recorded_BT is not None:
        recorded = NamedSharding(mesh, spec(*layers))
    return Routes(
        Replay(NamedSharding(mesh, spec(*layers, None)), recorded),  # type: ignore[arg-type]
        jax.tree.map(lambda _: NamedSharding(mesh, shards), routes.plans),
    )

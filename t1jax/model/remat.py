"""Rematerialisation policies by name: what the backward pass keeps and what it computes again.

"dots" keeps every matrix product's result, the experts' included, and computes what lies between
again: on CPU as fast as keeping everything, in about half of the memory (docs/model.md).

Applied to each layer. The names are set with `checkpoint_name` where the values are made.
"""

from collections.abc import Callable
from typing import Any

import jax

KEPT_NAMES = ("mixer_out", "gate_up", "route_ids")

# name -> policy of jax.checkpoint; None: no rematerialisation, every residual is kept.
POLICIES: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*KEPT_NAMES),
    ),
    "names": jax.checkpoint_policies.save_only_these_names(*KEPT_NAMES),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(KEPT_NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def rematerialise(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Wraps one layer's function in the named policy."""
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=False)

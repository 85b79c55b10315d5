"""The optimizer: AdamW on float32 masters, with the recipe's schedules, clip and decay mask.

An `Optimizer` wraps any optax transformation. Where parameters are narrower than float32 their
float32 masters are part of its state, and parameters are the masters rounded: an update far below
a bfloat16's rounding is not lost. Knows nothing of losses and batches.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from t1jax.model.qwen3_5 import Params

SCHEDULES = ("constant", "cosine")
# Decay pulls matrices towards 0, as in Megatron. For a norm's scale, a bias or a decay rate 0 is
# no neutral value.
NOT_DECAYED = ("scale", "bias", "decay_bias", "log_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a schedule, in optimizer steps; the defaults are the recipe's."""

    learning_rate: float
    schedule: str = "constant"
    final_learning_rate: float = 0.0  # cosine: reached after `steps`
    steps: int = 0  # cosine: of the whole run, warm-up included
    warmup_steps: int = 0  # linear, from learning_rate / (warmup_steps + 1)
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # decoupled: times the learning rate
    max_gradient_norm: float = 1.0  # of all gradients together; .inf: no clip
    moments_dtype: str = "float32"  # bfloat16 halves the optimizer's memory

    def __post_init__(self) -> None:
        _expect(self.learning_rate >= 0, self, "learning_rate", "0 or more, such as 1e-6")
        _expect(self.schedule in SCHEDULES, self, "schedule", f"one of {SCHEDULES}")
        _expect(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")
        _expect(0 <= self.b1 < 1, self, "b1", "0 or more and below 1, such as 0.9")
        _expect(0 <= self.b2 < 1, self, "b2", "0 or more and below 1, such as 0.98")
        _expect(self.epsilon > 0, self, "epsilon", "a positive number, such as 1e-8")
        _expect(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        _expect(self.max_gradient_norm > 0, self, "max_gradient_norm", "positive; .inf: no clip")
        _expect(
            self.moments_dtype in ("float32", "bfloat16"), self, "moments_dtype",
            "float32 or bfloat16",
        )  # fmt: skip
        if self.schedule == "cosine":
            most = f"more than warmup_steps={self.warmup_steps}, to have steps to decay in"
            _expect(self.steps > self.warmup_steps, self, "steps", most)
            lower = f"within 0..learning_rate={self.learning_rate}"
            below = 0 <= self.final_learning_rate <= self.learning_rate
            _expect(below, self, "final_learning_rate", lower)
        # A factor closer to 1 than half a bfloat16's last place rounds to no change at all.
        moves = 1 - max(self.b1, self.b2) > 2**-8
        _expect(
            self.moments_dtype == "float32" or moves, self, "moments_dtype",
            f"float32 with b1={self.b1}, b2={self.b2}: in bfloat16 such a moment never decays",
        )  # fmt: skip


def _expect(right: bool, config: OptimizerConfig, field: str, expected: str) -> None:
    if not right:
        raise ValueError(f"optimizer.{field}={getattr(config, field)!r}; expected {expected}")


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of each step, the first being step 0."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "cosine" and peak > 0:
        after = optax.cosine_decay_schedule(
            peak, config.steps - warmup, alpha=config.final_learning_rate / peak
        )
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def decayed(params: Params) -> Params:
    """The weight-decay mask: False for norms' scales, biases and decay rates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in NOT_DECAYED, params
    )


def recipe(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by the global norm, Adam, decoupled weight decay (Loshchilov and Hutter, 1711.05101).

    The update of weight w is -rate (m / (sqrt(v) + epsilon) + decay w), m and v bias-corrected.
    """
    adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    if config.moments_dtype != "float32":
        adam = _held_in(adam, jnp.dtype(config.moments_dtype))
    parts = [
        adam,
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule(config)),
    ]
    if math.isfinite(config.max_gradient_norm):
        parts = [optax.clip_by_global_norm(config.max_gradient_norm), *parts]
    return optax.chain(*parts)


def _held_in(inner: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """Keeps the floating-point state in `dtype` between steps; within a step it is float32."""

    def cast(state: Any, dtype: Any) -> Any:
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, state)

    def init(params: Any) -> Any:
        return cast(inner.init(params), dtype)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


class OptimizerState(NamedTuple):
    """What an optimizer carries from step to step."""

    masters: Params  # float32 weights; None where the parameter is float32 itself
    inner: Any  # of the optax transformation


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation that sees float32 masters, whatever the parameters' dtype.

    optax raises decay rates to an int32 count, which strict promotion forbids: it runs under the
    standard rules. Everything it sees is float32 already.
    """

    transform: optax.GradientTransformation

    def init(self, params: Params) -> OptimizerState:
        """The state before the first step; masters are exactly the parameters."""
        masters = jax.tree.map(_master, params, params)
        with jax.numpy_dtype_promotion("standard"):
            return OptimizerState(masters, self.transform.init(_weights(params, masters)))

    def update(
        self, gradients: Params, state: OptimizerState, params: Params
    ) -> tuple[Params, OptimizerState, jax.Array]:
        """One step: new parameters, new state, and the norm of the change of the masters."""
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        weights = _weights(params, state.masters)
        with jax.numpy_dtype_promotion("standard"):
            updates, inner = self.transform.update(gradients, state.inner, weights)
        weights = jax.tree.map(jnp.add, weights, updates)
        masters = jax.tree.map(_master, weights, params)
        params = jax.tree.map(lambda w, p: w.astype(p.dtype), weights, params)
        return params, OptimizerState(masters, inner), optax.tree.norm(updates)

    def abstract(self, params: Params) -> OptimizerState:
        """The state of abstract parameters, each leaf with its parameter's sharding."""
        state: OptimizerState = jax.eval_shape(self.init, params)
        whole = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())
        masters = jax.tree.map(
            lambda p, m: None if m is None else _placed(m, p.sharding), params, state.masters
        )
        inner = optax.tree.map_params(
            self.transform,
            lambda leaf, param: _placed(leaf, param.sharding),
            state.inner,
            params,
            transform_non_params=lambda leaf: _placed(leaf, whole),
        )
        return OptimizerState(masters, inner)


def _master(weight: jax.Array, param: jax.Array) -> jax.Array | None:
    return None if param.dtype == jnp.float32 else weight.astype(jnp.float32)


def _weights(params: Params, masters: Params) -> Params:
    return jax.tree.map(lambda p, m: p if m is None else m, params, masters)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

"""Parameter declaration and the small layers that everything shares.

Array names carry their axes as a suffix, from one closed alphabet:

B rows · T positions · S other positions (cached, or a chunk's columns) · D residual width
N query heads · K kv heads · G query heads per kv head · H head width
J delta-net key heads · I delta-net value heads · X key width · Y value width · W convolution taps
Z chunks of positions · P flat tokens (B·T) · E experts · C chosen experts · F hidden units
R routed copies of tokens · V vocabulary · L layers · U gate and up (2) · Q stop tokens of a slot
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
StackShape = tuple[int, ...]  # leading axes of a parameter that the scan over layers consumes


def declare(
    stack: StackShape,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Init,
    *,
    float32: bool = False,
) -> nnx.Param:
    """A parameter's one declaration: shape, logical axes, initializer, staying float32 or not.

    The module tree is abstract: values come from `init_params` or a checkpoint, and are bound at
    the call. `dtype` here is the float32 that masters have; `abstract_params` narrows it.
    """
    return nnx.Param(
        jax.ShapeDtypeStruct((*stack, *shape), jnp.float32),
        axes=("groups",) * len(stack) + axes,
        init=init,
        float32=float32,
    )


def normal(stddev: float = 0.02) -> Init:
    """Gaussian initializer with this standard deviation (the reference's initializer_range)."""
    return jax.nn.initializers.normal(stddev)


zeros: Init = jax.nn.initializers.zeros
ones: Init = jax.nn.initializers.ones


def log_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """log of U(0, 16), the reference's initial decay A; kept off 0 so that the log is finite."""
    return jnp.log(jax.random.uniform(key, shape, dtype, minval=1e-3, maxval=16.0))


class RMSNorm(nnx.Module):
    """Zero-centred RMS norm over the last axis: x / rms(x) * (1 + w), in float32."""

    def __init__(self, width: int, axis: str | None, epsilon: float, stack: StackShape = ()):
        self.epsilon = epsilon
        self.scale = declare(stack, (width,), (axis,), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def l2_norm(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis, float32. An all-zero row stays zero with a zero gradient.

    Without the guard a zero row's gradient is rsqrt(1e-6) = 1000 times the incoming one, at every
    position of a padded sequence.
    """
    square = jnp.sum(x**2, axis=-1, keepdims=True)
    inverse = jnp.where(square > 0, jax.lax.rsqrt(square + 1e-6), 0.0)
    return x * inverse


def rotary_tables(
    positions_BT: jax.Array, theta: float, rotary_dims: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, rotary_dims/2] for half-split pairing; angles in float32.

    Text only: the three position rows of M-RoPE are equal there, which is plain RoPE.
    """
    exponents = jnp.arange(0, rotary_dims, 2, dtype=jnp.float32) / rotary_dims
    angles = positions_BT[..., None].astype(jnp.float32) * theta**-exponents
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first dimensions of each head; dimension j pairs with j + rotary_dims/2."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second, rest = jnp.split(x_BTNH, (half, 2 * half), axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
    )

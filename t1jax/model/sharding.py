"""One table from logical axes to mesh axes, and the few helpers that read it.

A weight or activation names what its axes *are* ("embed", "experts", "rows"); `RULES` says where
each lies on the mesh. Nothing else in the model spells a mesh axis, except the collectives inside
`shard_map`, which name the axis they reduce over.

The mesh always has five axes, most of them of size 1:

| mesh axis | rows | positions | weights |
|---|---|---|---|
| data    | split | – | replicated |
| fsdp    | split | – | `embed` split, gathered layer by layer |
| expert  | split | – | experts split; tokens are exchanged inside the MoE layer |
| context | – | split | replicated: delta-net state and keys/values cross shards |
| tensor  | – | – | heads, expert and shared hidden units, vocabulary split |
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")

RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),
    "positions": ("context",),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": (),  # few: replicated, each shard reads the ones its query heads use
    "key_heads": ("tensor",),
    "value_heads": ("tensor",),
    "experts": ("expert",),
    "ffn": ("tensor",),
    "groups": (),  # the scan's axis
}


def make_mesh(shape: str = "", devices: list[jax.Device] | None = None) -> Mesh:
    """Builds the five-axis mesh from text like "data=2,expert=4"; unnamed axes have size 1.

    Args:
      shape: comma-separated axis=size; the product must not exceed the devices present.
      devices: the devices to use, all local and remote ones by default.

    Raises:
      ValueError: an unknown axis, a size that is not a positive integer, or too few devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict.fromkeys(MESH_AXES, 1)
    given: list[str] = []
    for part in shape.split(",") if shape else []:
        axis, _, size = part.partition("=")
        given.append(axis.strip())
        if given.count(axis.strip()) > 1:
            raise ValueError(f"mesh {shape!r} names the axis {axis.strip()!r} twice")
        if axis.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh {shape!r}: {part!r} is not AXIS=SIZE with an axis of {MESH_AXES} "
                "and a positive size; write for example data=2,expert=4"
            )
        sizes[axis.strip()] = int(size)
    count = math.prod(sizes.values())
    if count > len(devices):
        message = f"mesh {shape!r} needs {count} devices; {len(devices)} are present"
        if devices[0].platform == "cpu":
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            message += f"; on CPU set {flag}"
        raise ValueError(message)
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices[:count],
    )


def axis_size(mesh: Mesh, logical: str) -> int:
    """In how many parts the mesh splits an axis of this logical name."""
    return math.prod(mesh.shape[axis] for axis in RULES[logical])


def spec(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of an array whose axes carry these logical names (None: whole)."""
    mesh_axes = [() if axis is None else RULES[axis] for axis in axes]
    used = [axis for group in mesh_axes for axis in group]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} use a mesh axis twice: {mesh_axes}")
    return PartitionSpec(*(group if group else None for group in mesh_axes))


def check_divides(mesh: Mesh, what: str, shape: tuple[int, ...], axes: tuple) -> None:
    """Raises ValueError, naming array, axis and sizes, when the mesh does not divide `shape`."""
    for size, axis in zip(shape, axes, strict=True):
        parts = 1 if axis is None else axis_size(mesh, axis)
        if size % parts:
            raise ValueError(
                f"{what}: axis {axis!r} has size {size}, which the mesh splits in {parts} "
                f"({', '.join(f'{a}={mesh.shape[a]}' for a in RULES[axis])}); "
                "choose a mesh whose sizes divide it"
            )


def param_sharding(mesh: Mesh, name: str, shape: tuple[int, ...], axes: tuple) -> NamedSharding:
    """Where a parameter lives; refuses a mesh that does not divide it."""
    check_divides(mesh, name, shape, axes)
    return NamedSharding(mesh, spec(*axes))


def constrain(x: jax.Array, mesh: Mesh, *axes: str | None) -> jax.Array:
    """Tells the partitioner where an activation lies."""
    if mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(*axes)))


def per_shard(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`shard_map` over the whole mesh, or the function itself where there is one device.

    `check_vma=False` on purpose: with the check on, the gradient of a gather whose index differs
    per shard came out wrong, silently (error 0.18 on a maximum of 0.14, jax 0.10.2 and 0.12.0.1).
    Every sharded gradient is tested against the unsharded one.
    """
    if mesh.size == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

"""How a model is run, as against what it computes: one frozen value, passed to every call."""

import dataclasses

import jax
from jax.sharding import Mesh

from t1jax.model import remat
from t1jax.model.sharding import make_mesh

CHOICES = {
    "grouped_matmul": ("blocked", "ragged", "tokamax", "dense"),
    "dispatch": ("gather", "ragged_all_to_all"),
    "attention": ("blockwise", "splash"),
    "remat": tuple(remat.POLICIES),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Mesh, numerics and kernels of one call. Hashable: a static argument of `jax.jit`.

    None of it changes the mathematics; two Executions agree to rounding.
    """

    mesh: Mesh
    dtype: str = "bfloat16"  # activations; float32 where the reference uses float32
    router_dtype: str = ""  # of the router's product; empty: as the activations (the reference)
    remat: str = "none"  # see remat.POLICIES
    grouped_matmul: str = "blocked"
    dispatch: str = "gather"
    attention: str = "blockwise"
    chunk: int = 64  # positions per delta-net chunk

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"execution.{field}={value!r}; expected one of {allowed}")
        if self.chunk < 1 or self.chunk & (self.chunk - 1):
            raise ValueError(f"execution.chunk={self.chunk}; expected a power of two, such as 64")
        for field in ("dtype", "router_dtype"):
            value = getattr(self, field)
            if value not in ("bfloat16", "float32") and not (field == "router_dtype" and not value):
                raise ValueError(f"execution.{field}={value!r}; expected bfloat16 or float32")

    @property
    def precision(self) -> str | None:
        """Matmul precision that keeps float32 activations float32 on TPU."""
        return "highest" if self.dtype == "float32" else None

    @property
    def compiler_options(self) -> dict[str, str]:
        """For `jax.jit(..., compiler_options=)` of a program that calls the model.

        XLA's default schedule on CPU starts what it can as soon as it can: a training step then
        holds 1.5 to 2 times the memory, and is no faster on few cores (docs/model.md).
        """
        if self.mesh.devices.flat[0].platform != "cpu":
            return {}
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def default_execution(mesh: Mesh | None = None, **changes: str | int) -> Execution:
    """The Execution for the mesh's platform: blocked kernels on CPU, native ones on TPU."""
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    platform = mesh.devices.flat[0].platform
    native = {"grouped_matmul": "ragged", "attention": "splash"}
    return Execution(mesh=mesh, **((native if platform == "tpu" else {}) | changes))

"""From a checkpoint to a scheduler: the one place where sampling meets files."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from t1jax.checkpoint.restore import open_checkpoint
from t1jax.config import SamplerSection
from t1jax.errors import UserError
from t1jax.model.config import ModelConfig
from t1jax.model.execution import default_execution
from t1jax.model.qwen3_5 import Params
from t1jax.model.sharding import make_mesh

if TYPE_CHECKING:
    from t1jax.sampling.scheduler import Scheduler

def load_weights(checkpoint: str, mesh: str, dtype: str) -> tuple[ModelConfig, Params]:
    """Sizes and weights, each where the engine wants it."""
    try:
        return open_checkpoint(checkpoint, None, make_mesh(mesh), dtype)
    except ValueError as error:
        raise UserError(str(error)) from None


@asynccontextmanager
async def scheduler(
    weights: tuple[ModelConfig, Params],
    options: SamplerSection,
    *,
    mesh: str = "",
    dtype: str = "bfloat16",
    version: int = 0,
) -> AsyncIterator["Scheduler"]:
    """A scheduler of these weights for the length of a block."""
    from t1jax.sampling.engine import T1Engine  # imports TensorFlow
    from t1jax.sampling.scheduler import Scheduler, sizes_of

    config, params = weights
    try:
        run = default_execution(make_mesh(mesh), dtype=dtype)
        engine = T1Engine(config, run, sizes_of(options))
    except ValueError as error:
        raise UserError(str(error)) from None
    async with Scheduler(engine, params, options, version=version) as ours:
        yield ours

"""A checkpoint as a policy: which one plays, its tokenizer, its engine, the shape of its routes."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from t1jax.agent.conversation import Policy
from t1jax.config import Config
from t1jax.pipeline.learning import policy_path
from t1jax.sampling.open import load_weights, scheduler
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import RouteShape


def player(config: Config, named: str) -> str:
    """The checkpoint that plays: the one named, else the run's last weights, else the model's."""
    return named or policy_path(config)


def identity(checkpoint: str) -> dict[str, str]:
    """What tells weights apart that lay in one place at different times; for trials' settings.

    A converted or trained checkpoint's manifest has hashes of what it was made from, the stage and
    its steps. A Hugging Face directory has none: its path alone counts.
    """
    manifest = Path(checkpoint) / "manifest.json"
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else ""
    return {"checkpoint": checkpoint, "manifest_sha256": digest}


@asynccontextmanager
async def open_policy(config: Config, checkpoint: str) -> AsyncIterator[Policy]:
    """The checkpoint's policy, answering for the length of a block."""
    section = config.model
    chat = Chat.load(checkpoint)
    weights = load_weights(checkpoint, section.mesh, section.dtype)
    model = weights[0]
    shape = RouteShape(layers=model.layers, chosen=model.moe.chosen, experts=model.moe.experts)
    async with scheduler(weights, config.sampler, mesh=section.mesh, dtype=section.dtype) as engine:
        yield Policy(complete=engine.complete, chat=chat, shape=shape)

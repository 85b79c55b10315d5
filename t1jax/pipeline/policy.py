"""A checkpoint as a policy: its tokenizer, its engine with a scheduler, the shape of its routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from t1jax.agent.conversation import Policy
from t1jax.config import Config
from t1jax.sampling.open import load_weights, scheduler
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import RouteShape


@asynccontextmanager
async def open_policy(config: Config) -> AsyncIterator[Policy]:
    """The policy of `model.checkpoint`, answering for the length of a block."""
    section = config.model
    chat = Chat.load(section.checkpoint)
    weights = load_weights(section.checkpoint, section.mesh, section.dtype)
    model = weights[0]
    shape = RouteShape(layers=model.layers, chosen=model.moe.chosen, experts=model.moe.experts)
    async with scheduler(weights, config.sampler, mesh=section.mesh, dtype=section.dtype) as engine:
        yield Policy(complete=engine.complete, chat=chat, shape=shape)

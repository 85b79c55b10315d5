"""What turns hidden states into numbers one uses: token log-probs, or a value per token."""

import jax
import jax.numpy as jnp
from flax import nnx

from t1jax.model.config import ModelConfig
from t1jax.model.execution import Execution
from t1jax.model.layers import declare, normal, zeros
from t1jax.model.sharding import constrain

LOGPROB_BLOCK = 256  # positions whose logits over the vocabulary are alive at once


class LMHead(nnx.Module):
    """Logits over the vocabulary; not tied to the embedding."""

    def __init__(self, config: ModelConfig):
        self.weight = declare((), (config.embed, config.vocab), ("embed", "vocab"), normal())

    def __call__(self, hidden_BTD: jax.Array, run: Execution) -> jax.Array:
        """[B, T, V] in the activations' dtype, as the reference does; upcast before softmax."""
        logits_BTV = jnp.einsum(
            "BTD,DV->BTV", hidden_BTD, self.weight[...].astype(hidden_BTD.dtype),
            precision=run.precision,
        )
        return constrain(logits_BTV, run.mesh, "rows", "positions", "vocab")

    def logprobs(
        self, hidden_BTD: jax.Array, targets_BT: jax.Array, run: Execution
    ) -> jax.Array:
        """log p(target) float32 [B, T], a block of positions at a time.

        Peak memory is one block's logits, forward and backward: independent of V times T.
        """

        @jax.checkpoint
        def block(hidden_BTD, targets_BT):
            logits_BTV = self(hidden_BTD, run).astype(jnp.float32)
            picked_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
            return picked_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)

        B, T, _ = hidden_BTD.shape
        size = min(LOGPROB_BLOCK, T)
        if run.mesh.shape["context"] > 1 or size == T:
            return block(hidden_BTD, targets_BT)
        cut = lambda x: jnp.moveaxis(  # noqa: E731
            jnp.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2)).reshape(
                B, -1, size, *x.shape[2:]
            ), 1, 0,
        )
        _, out = jax.lax.scan(
            lambda carry, x: (carry, block(*x)), None, (cut(hidden_BTD), cut(targets_BT))
        )
        return jnp.moveaxis(out, 0, 1).reshape(B, -1)[:, :T]


class ValueHead(nnx.Module):
    """One scalar per token, for the critic; starts at zero weight (its bias: the mean reward)."""

    def __init__(self, config: ModelConfig):
        self.weight = declare((), (config.embed,), ("embed",), zeros)
        self.bias = declare((), (), (), zeros)

    def __call__(self, hidden_BTD: jax.Array, run: Execution) -> jax.Array:
        """Values [B, T], float32."""
        hidden_BTD = hidden_BTD.astype(jnp.float32)
        values_BT = jnp.einsum(
            "BTD,D->BT", hidden_BTD, self.weight[...].astype(jnp.float32), precision="highest"
        )
        return values_BT + self.bias[...].astype(jnp.float32)


HEADS = {"lm": LMHead, "value": ValueHead}

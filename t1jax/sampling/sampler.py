"""From logits to a token and its log-probs: temperature, top-k and top-p, per row.

Owns what a request may ask of the draw. A row's draw depends on its own logits, settings, seed and
position alone, never on who shares the batch: a request repeated gives the same tokens.

Two log-probs leave with each token. `raw` is what training uses: log softmax(logits / temperature)
over the whole vocabulary. `filtered` is the log-probability with which this token was in fact
drawn, top-k and top-p having removed others. At temperature 0 the draw is the argmax; its raw
log-prob is that of temperature 1 (a point mass would say 0 of every token), its filtered one is 0.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How each row is drawn. Values that `check` refuses give undefined results."""

    temperature_B: jax.Array  # float32, 0 (greedy) or more
    top_k_B: jax.Array  # int32; 0 keeps every token
    top_p_B: jax.Array  # float32 in (0, 1]; 1 keeps every token
    seed_B: jax.Array  # uint32


class Draw(NamedTuple):
    """Drawn tokens; see the module for the two log-probs."""

    token_B: jax.Array  # int32
    raw_logprob_B: jax.Array  # float32
    filtered_logprob_B: jax.Array  # float32


def check(*, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Refuses one request's settings, naming the setting, its value and what is allowed."""
    allowed = {
        "temperature": (temperature, 0 <= temperature < float("inf"), "0 (greedy) or more"),
        "top_k": (top_k, top_k >= 0, "0 (all tokens) or more"),
        "top_p": (top_p, 0 < top_p <= 1, "above 0 and at most 1 (all tokens)"),
        "seed": (seed, 0 <= seed < 2**32, "from 0 to 4294967295"),
    }
    for name, (value, fits, expected) in allowed.items():
        if not fits:
            raise ValueError(f"{name}={value}; expected {expected}")


def draw(logits_BV: jax.Array, position_B: jax.Array, settings: Settings) -> Draw:
    """Draws the token at `position` of each row.

    Args:
      logits_BV: any float dtype.
      position_B: int32, the drawn token's place in its sequence; with the seed it fixes the noise.
      settings: of each row.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    greedy_B1 = (settings.temperature_B == 0)[:, None]
    scaled_BV = logits_BV / jnp.where(greedy_B1, 1.0, settings.temperature_B[:, None])
    raw_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
    kept_BV = _kept(raw_BV, settings)
    # The argmax of log-probs with Gumbel noise is a draw from them (Gumbel-max). "high": float32
    # noise with the right tails, for tokens rarer than 2^-23 too.
    noise_BV = jax.vmap(_noise, (0, 0, None))(settings.seed_B, position_B, raw_BV.shape[-1])
    noise_BV = jnp.where(greedy_B1, 0.0, noise_BV)
    token_B = jnp.where(kept_BV, raw_BV + noise_BV, -jnp.inf).argmax(axis=-1).astype(jnp.int32)
    raw_B = jnp.take_along_axis(raw_BV, token_B[:, None], axis=-1)[:, 0]
    mass_B = jax.nn.logsumexp(raw_BV, axis=-1, where=kept_BV)
    filtered_B = jnp.where(greedy_B1[:, 0], 0.0, raw_B - mass_B)
    return Draw(token_B, raw_B, filtered_B)


def _noise(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")


def _kept(logprobs_BV: jax.Array, settings: Settings) -> jax.Array:
    """Which tokens may be drawn: of the K likeliest, the fewest that hold a mass of top_p.

    Top-k comes first and top-p is of the mass that it leaves, as in transformers and vLLM. Of equal
    tokens the lower id counts as likelier. The vocabulary is sorted only if some row asks for it.
    """
    V = logprobs_BV.shape[-1]
    all_kept = jnp.ones(logprobs_BV.shape, bool)

    def filtered() -> jax.Array:
        order_BV = jnp.argsort(-logprobs_BV, axis=-1, stable=True)
        sorted_BV = jnp.take_along_axis(logprobs_BV, order_BV, axis=-1)
        limit_B1 = jnp.where(settings.top_k_B > 0, settings.top_k_B, V)[:, None]
        within_BV = jnp.arange(V) < limit_B1
        mass_BV = jax.nn.softmax(jnp.where(within_BV, sorted_BV, -jnp.inf), axis=-1)
        before_BV = jnp.cumsum(mass_BV, axis=-1) - mass_BV  # of the likelier tokens
        top_p_B1 = settings.top_p_B[:, None]
        within_BV &= (before_BV < top_p_B1) | (top_p_B1 >= 1)
        rows_B1 = jnp.arange(logprobs_BV.shape[0])[:, None]
        return jnp.zeros_like(all_kept).at[rows_B1, order_BV].set(within_BV)

    asked = jnp.any((settings.top_k_B > 0) | (settings.top_p_B < 1))
    return jax.lax.cond(asked, filtered, lambda: all_kept)

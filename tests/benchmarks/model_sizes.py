"""The model that is compared, as a `config.json`, and the arithmetic that it needs.

Imports neither jax nor torch: both workers and the parent read it.
"""

from typing import Any

ROWS, POSITIONS = 4, 512  # tokens of a forward pass and of a training step
CACHED = 256  # tokens in the cache before the first decode step
CAPACITY = 512  # columns of our cache; the reference's grows
DECODE_STEPS = 8  # in one timed run


def document(layers: int = 8, experts: int = 64, **changes: Any) -> dict[str, Any]:
    """221 million parameters: 512 wide, 8 layers, 64 experts of which each token visits 8."""
    sizes = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    return sizes | changes


def narrow_document(layers: int) -> dict[str, Any]:
    """Small widths, for measuring compilation: it depends on the program, not on the widths."""
    return document(
        layers, 16, vocab_size=256, hidden_size=64, num_attention_heads=4, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts_per_tok=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


FORMULA = (
    "multiplications and additions (2 per product term) of the forward pass's matrix products, a "
    "token: delta-net layer 2D(2JX + 2IY + 2I) + 2IYD + 6IXY; attention layer "
    "2D(2NH + 2KH) + 2NHD + 4NH(T+1)/2; every layer 2DE + C*6DF + 6DF' + 2D; head 2DV. "
    "Causal attention counts the keys that a query sees, the recurrence its three products with "
    "the state: what the mathematics needs, not what an implementation does. Backward: twice."
)


def forward_flops(sizes: dict[str, Any], tokens: int, positions: int) -> float:
    """Arithmetic of all matrix products of a forward pass with logits; see `FORMULA`."""
    D, V, E = (sizes[name] for name in ("hidden_size", "vocab_size", "num_experts"))
    keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    heads, X = sizes["linear_num_value_heads"], sizes["linear_key_head_dim"]
    values = heads * sizes["linear_value_head_dim"]
    delta = 2 * D * (2 * keys + 2 * values + 2 * heads) + 2 * values * D + 6 * values * X
    H = sizes["head_dim"]
    queries, kv = sizes["num_attention_heads"] * H, sizes["num_key_value_heads"] * H
    attention = 2 * D * (2 * queries + 2 * kv) + 2 * queries * D + 4 * queries * (positions + 1) / 2
    routed = sizes["num_experts_per_tok"] * 6 * D * sizes["moe_intermediate_size"]
    moe = 2 * D * E + routed + 6 * D * sizes["shared_expert_intermediate_size"] + 2 * D
    layers = sizes["num_hidden_layers"]
    full = layers // sizes["full_attention_interval"]
    return tokens * ((layers - full) * delta + full * attention + layers * moe + 2 * D * V)

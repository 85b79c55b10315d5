"""The shape of a Qwen3.5-MoE text model, read once from its `config.json`.

Owns the architecture's sizes and their checks. Knows nothing of meshes, dtypes of activations,
back ends or training: those are arguments of a call (`Execution`), never part of a model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
LAYER_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Gated grouped-query attention with rotary positions on the first dimensions."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dims: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads={self.heads} is not a multiple of "
                f"num_key_value_heads={self.kv_heads}"
            )
        if self.rotary_dims % 2 or not 0 < self.rotary_dims <= self.head_dim:
            raise ValueError(
                f"rotary dims {self.rotary_dims} must be even and within 2..head_dim="
                f"{self.head_dim}; see rope_parameters.partial_rotary_factor"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated delta net: a recurrent state of key_dim x value_dim per value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.value_heads} is not a multiple of "
                f"linear_num_key_heads={self.key_heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts of `hidden` units, `chosen` of them per token, plus one shared expert."""

    experts: int
    chosen: int
    hidden: int
    shared_hidden: int

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.experts:
            raise ValueError(
                f"num_experts_per_tok={self.chosen} must be within 1..num_experts={self.experts}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the whole text model; `pattern` is one group of layers, repeated `groups` times."""

    vocab: int
    embed: int
    layers: int
    pattern: tuple[str, ...]
    rms_eps: float
    attention: AttentionConfig
    delta: DeltaConfig
    moe: MoEConfig

    def __post_init__(self) -> None:
        if self.layers % len(self.pattern):
            raise ValueError(
                f"num_hidden_layers={self.layers} is not a multiple of the repeated group of "
                f"{len(self.pattern)} layers {self.pattern}"
            )

    @property
    def groups(self) -> int:
        """How often `pattern` repeats: the trip count of the scan over layers."""
        return self.layers // len(self.pattern)

    @property
    def route_dtype(self) -> str:
        """The smallest unsigned dtype that holds every expert id (E - 1)."""
        return "uint8" if self.moe.experts <= 256 else "uint16"


def from_huggingface(document: Mapping[str, Any]) -> ModelConfig:
    """Reads a published `config.json` (whole, with `text_config`, or the flat text form).

    Raises:
      ValueError: the model type is another one, a field is missing, or an option that would
        change the mathematics is set to something this model does not compute.
    """
    text = document.get("text_config", document)
    model_type = text.get("model_type", document.get("model_type"))
    if document.get("model_type") not in MODEL_TYPES or model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type is {document.get('model_type')!r}; expected one of {MODEL_TYPES}: "
            "t1jax runs Qwen3.5-MoE only"
        )
    _refuse_other_mathematics(text)
    rope = _field(text, "rope_parameters")
    head_dim = _field(text, "head_dim")
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    return ModelConfig(
        vocab=_field(text, "vocab_size"),
        embed=_field(text, "hidden_size"),
        layers=_field(text, "num_hidden_layers"),
        pattern=_pattern(text),
        rms_eps=_field(text, "rms_norm_eps"),
        attention=AttentionConfig(
            heads=_field(text, "num_attention_heads"),
            kv_heads=_field(text, "num_key_value_heads"),
            head_dim=head_dim,
            rope_theta=float(_field(rope, "rope_theta", "rope_parameters.")),
            rotary_dims=int(head_dim * fraction),
        ),
        delta=DeltaConfig(
            key_heads=_field(text, "linear_num_key_heads"),
            value_heads=_field(text, "linear_num_value_heads"),
            key_dim=_field(text, "linear_key_head_dim"),
            value_dim=_field(text, "linear_value_head_dim"),
            conv_width=_field(text, "linear_conv_kernel_dim"),
        ),
        moe=MoEConfig(
            experts=_field(text, "num_experts"),
            chosen=_field(text, "num_experts_per_tok"),
            hidden=_field(text, "moe_intermediate_size"),
            shared_hidden=_field(text, "shared_expert_intermediate_size"),
        ),
    )


def _field(document: Mapping[str, Any], name: str, path: str = "") -> Any:
    if name not in document:
        raise ValueError(f"config.json has no {path}{name}; it is needed to build the model")
    return document[name]


def _refuse_other_mathematics(text: Mapping[str, Any]) -> None:
    """Options that exist in the family and would silently change results here."""
    computed = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "mlp_only_layers": [],
    }
    for name, value in computed.items():
        if name in text and text[name] != value:
            raise ValueError(f"config.json sets {name}={text[name]!r}; only {value!r} is supported")
    rope_type = text.get("rope_parameters", {}).get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"rope_parameters.rope_type={rope_type!r}; only 'default' is supported")


def _pattern(text: Mapping[str, Any]) -> tuple[str, ...]:
    """The shortest group of layer kinds whose repetition gives the model's layers."""
    layers = _field(text, "num_hidden_layers")
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    unknown = sorted(set(kinds) - set(LAYER_KINDS))
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {layers} layers, unknown kinds {unknown}; "
            f"expected {layers} of {sorted(LAYER_KINDS)}"
        )
    sizes = [n for n in range(1, layers + 1) if layers % n == 0]
    size = next(n for n in sizes if kinds == kinds[:n] * (layers // n))
    return tuple(LAYER_KINDS[kind] for kind in kinds[:size])

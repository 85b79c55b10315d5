"""The shape of a Qwen3.5-MoE text model, read once from its `config.json`.

Owns the architecture's sizes and their checks. Knows nothing of meshes, dtypes of activations,
back ends or training: those are arguments of a call (`Execution`), never part of a model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
LAYER_KINDS = {"linear_attention": "delta", "full_attention": "attention"}
MAX_EXPERTS = 2**16  # ids are recorded in 16 bits
ROTARY_FRACTION = 0.25  # of each head's dimensions, where config.json does not say


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


# ---- config.json --------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=1, lt=2**31)]  # arrays are indexed by int32
Fraction = Annotated[float, Field(gt=0, le=1)]


class _Fields(BaseModel):
    """Fields that are read, strictly: true is no integer, and neither are "2048" and 2048.0."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rope(_Fields):
    rope_theta: Annotated[float, Field(ge=1, le=1e12)]
    partial_rotary_factor: Fraction | None = None


class _Text(_Fields):
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    rms_norm_eps: Annotated[float, Field(ge=1e-12, lt=1)]
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rope_parameters: _Rope
    partial_rotary_factor: Fraction | None = None
    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count
    num_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    shared_expert_intermediate_size: Count


def from_huggingface(document: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a published `config.json` (whole, with `text_config`, or the flat text form).

    Args:
      document: what the file holds.
      where: the file, for messages.

    Raises:
      ValueError: the model type is another one, a field is missing or has another type or range,
        or an option that would change the mathematics is set to something this model does not
        compute.
    """
    path = "text_config." if "text_config" in document else ""
    text = document.get("text_config", document)
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config is {_shown(text)}; expected a JSON object")
    for found in (document.get("model_type"), text.get("model_type", document.get("model_type"))):
        if found not in MODEL_TYPES:
            raise ValueError(
                f"{where}: model_type is {found!r}; expected one of {MODEL_TYPES}: "
                "t1jax runs Qwen3.5-MoE only"
            )
    try:
        read = _Text.model_validate(dict(text))
        _refuse_other_mathematics(text)
        return _sizes(read)
    except ValidationError as error:
        raise ValueError(f"{where} {_explained(error, path)}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _sizes(text: _Text) -> ModelConfig:
    return ModelConfig(
        vocab=text.vocab_size,
        embed=text.hidden_size,
        layers=text.num_hidden_layers,
        pattern=_pattern(text),
        rms_eps=text.rms_norm_eps,
        attention=AttentionConfig(
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            rope_theta=text.rope_parameters.rope_theta,
            rotary_dims=int(text.head_dim * _rotary_fraction(text)),
        ),
        delta=DeltaConfig(
            key_heads=text.linear_num_key_heads,
            value_heads=text.linear_num_value_heads,
            key_dim=text.linear_key_head_dim,
            value_dim=text.linear_value_head_dim,
            conv_width=text.linear_conv_kernel_dim,
        ),
        moe=MoEConfig(
            experts=text.num_experts,
            chosen=text.num_experts_per_tok,
            hidden=text.moe_intermediate_size,
            shared_hidden=text.shared_expert_intermediate_size,
        ),
    )


def _explained(error: ValidationError, path: str) -> str:
    """Each wrong field by its path, with its value and what was expected."""
    parts = []
    for detail in error.errors(include_url=False):
        field = path + ".".join(map(str, detail["loc"]))
        if detail["type"] == "missing":
            parts.append(f"has no {field}; it is needed to build the model")
        elif detail["type"] == "model_type":
            parts.append(f"has {field}={_shown(detail['input'])}; expected a JSON object")
        else:
            expected = detail["msg"].replace("Input should be", "expected", 1)
            parts.append(f"has {field}={_shown(detail['input'])}; {expected}")
    return ", and ".join(parts)


def _shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rotary_fraction(text: _Text) -> float:
    """Stands beside the other fields in some releases, in rope_parameters in others, or in both."""
    outer, inner = text.partial_rotary_factor, text.rope_parameters.partial_rotary_factor
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(
            f"partial_rotary_factor={outer} and rope_parameters.partial_rotary_factor={inner} "
            "contradict each other; keep the one that the model was trained with"
        )
    return next((found for found in (inner, outer) if found is not None), ROTARY_FRACTION)


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
            raise ValueError(f"{name} is {_shown(text[name])}; only {_shown(value)} is supported")
    rope_type = text["rope_parameters"].get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(
            f"rope_parameters.rope_type is {_shown(rope_type)}; only 'default' is supported"
        )


def _pattern(text: _Text) -> tuple[str, ...]:
    """The shortest group of layer kinds whose repetition gives the model's layers."""
    layers, interval = text.num_hidden_layers, text.full_attention_interval
    kinds = text.layer_types or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    unknown = sorted(set(kinds) - set(LAYER_KINDS))
    if unknown:
        raise ValueError(f"layer_types holds {unknown}; expected only {sorted(LAYER_KINDS)}")
    if len(kinds) != layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries; expected num_hidden_layers={layers}"
        )
    sizes = [n for n in range(1, layers + 1) if layers % n == 0]
    size = next(n for n in sizes if kinds == kinds[:n] * (layers // n))
    return tuple(LAYER_KINDS[kind] for kind in kinds[:size])

"""config.json is read as it is written: a value of another type or range is named, never used."""

import math

import pytest

from t1jax.model.config import from_huggingface
from tests.checkpoint import made

SIZES = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "full_attention_interval",
]  # fmt: skip


def refused(document, *words):
    """The refusal is one line with these words in it."""
    with pytest.raises(ValueError) as caught:
        from_huggingface(document, "ck/config.json")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("ck/config.json")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("value", [True, 4.0, "4", None, 0, -4, 2**31, [4], {}], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_positive_integer(name, value):
    refused(made.document(**{name: value}), f"text_config.{name}={value!r}", "expected")


@pytest.mark.parametrize("value", [True, "1e-6", None, 0, -1e-6, 1, math.nan, math.inf], ids=str)
def test_an_epsilon_is_a_small_number(value):
    shown = repr(value)
    refused(made.document(rms_norm_eps=value), f"text_config.rms_norm_eps={shown}; expected")


@pytest.mark.parametrize("value", [True, "1e7", None, 0, 0.5, math.nan, math.inf], ids=str)
def test_a_rope_base_is_a_number_above_one(value):
    document = made.document(rope_parameters={"rope_theta": value})
    refused(document, f"rope_parameters.rope_theta={value!r}; expected")


@pytest.mark.parametrize("value", [None, [], 5], ids=str)
def test_rope_parameters_are_an_object(value):
    expected = f"rope_parameters={value!r}; expected a JSON object"
    refused(made.document(rope_parameters=value), expected)


@pytest.mark.parametrize("value", [None, [], "x"], ids=str)
def test_a_text_config_is_an_object(value):
    shown = repr(value)
    refused({"model_type": "qwen3_5_moe", "text_config": value}, f"text_config is {shown}")


@pytest.mark.parametrize("name", [n for n in SIZES if n != "full_attention_interval"])
def test_a_size_that_is_missing(name):
    document = made.document()
    del document["text_config"][name]
    refused(document, f"has no text_config.{name}")


def test_the_flat_form_names_its_fields_without_text_config():
    document = made.document(num_experts=None)["text_config"]
    refused(document, "has num_experts=None; expected")


def test_every_wrong_field_is_named():
    refused(made.document(num_experts=None, vocab_size="16"), "num_experts=", "vocab_size=")


def test_rotary_fractions_that_contradict_each_other():
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    document = made.document(partial_rotary_factor=0.5, rope_parameters=rope)
    refused(document, "partial_rotary_factor=0.5", "rope_parameters.partial_rotary_factor=1.0")


@pytest.mark.parametrize(
    ("outer", "inner", "dims"), [(None, None, 2), (0.5, None, 4), (None, 1, 8), (1, 1.0, 8)]
)
def test_a_rotary_fraction_stands_in_either_place(outer, inner, dims):
    sizes = {} if outer is None else {"partial_rotary_factor": outer}
    rope = {"rope_theta": 10_000} | ({} if inner is None else {"partial_rotary_factor": inner})
    config = from_huggingface(made.document(head_dim=8, rope_parameters=rope, **sizes))
    assert config.attention.rotary_dims == dims
    assert config.attention.rope_theta == 1e4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"layer_types": ["sparse"] * 4}, ("layer_types", "'sparse'", "full_attention")),
        ({"layer_types": ["full_attention"] * 3}, ("3 entries", "num_hidden_layers=4")),
        ({"layer_types": "full_attention"}, ("layer_types='full_attention'", "list")),
        ({"layer_types": [4]}, ("layer_types.0=4", "string")),
        ({"num_experts_per_tok": 4}, ("num_experts_per_tok=4", "num_experts=3")),
        ({"num_experts": 2**16 + 1}, ("num_experts=65537", "65536")),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, ("num_attention_heads=3",)),
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "'silu'")),
        ({"attention_bias": True}, ("attention_bias is True", "False")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_fields_that_do_not_fit(sizes, words):
    refused(made.document(**sizes), *words)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_is_told_so(value):
    refused(made.document(rms_norm_eps=value), f"rms_norm_eps={value}; expected a finite number")

"""The small random checkpoint has everything that a published one has."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.huggingface import is_carried
from t1jax.checkpoint.init_tiny import ADDED_TOKENS, init_tiny
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import read_directory
from t1jax.errors import UserError

from . import made

TEXT = "$ ls -la /app\nhello <think>\nnaïve 你好 12345\n</think> don't   stop<|im_end|>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    init_tiny(folder, progress=made.silent())
    return folder


def test_it_opens_and_survives_the_round_trip(tiny, tmp_path):
    config, _ = open_checkpoint(tiny)
    assert set(config.pattern) == {"delta", "attention"}
    assert (config.groups, config.moe.experts, config.moe.chosen) == (2, 16, 4)
    convert(tiny, tmp_path / "dst", progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(tiny, tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        tiny / "tokenizer.json"
    ).read_bytes()


def test_its_tensors_are_as_published(tiny):
    """bfloat16 but A_log and the delta net's norm; 17 + 3 E MTP tensors and a vision tower."""
    tensors = read_directory(tiny)
    wide = {name.split(".", 4)[-1] for name, t in tensors.items() if t.dtype == np.float32}
    assert wide == {"linear_attn.A_log", "linear_attn.norm.weight"}
    assert sum(name.startswith("mtp.") for name in tensors) == 17 + 3 * 16
    assert sum(name.startswith("model.visual.") for name in tensors) == 9 + 12
    numbers = sum(t.array().size for name, t in tensors.items() if not is_carried(name))
    assert 3e6 < numbers < 6e6


def test_only_the_seed_changes_the_weights(tiny, tmp_path):
    init_tiny(tmp_path / "same", progress=made.silent())
    init_tiny(tmp_path / "other", seed=1, progress=made.silent())
    made.assert_same_tensors(tiny, tmp_path / "same")
    for file in sorted(path.name for path in tiny.iterdir()):
        if not file.endswith(".safetensors"):
            assert (tiny / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    embed = "model.language_model.embed_tokens.weight"
    ours, theirs = (read_directory(p)[embed].array() for p in (tiny, tmp_path / "other"))
    assert (ours != theirs).any()


def test_its_tokenizer_returns_any_text_and_knows_the_published_tokens(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    for name, special in ADDED_TOKENS:
        (number,) = tokenizer.encode(name).ids
        assert tokenizer.id_to_token(number) == name
        assert (tokenizer.decode([number]) == "") == special
    assert len(tokenizer.encode("12345").ids) == 5  # every digit is a token, as published
    config = json.loads((tiny / "config.json").read_text())
    assert tokenizer.get_vocab_size() <= config["text_config"]["vocab_size"]


def test_a_chat_stops_at_im_end(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    end, text = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [end, text]
    config = json.loads((tiny / "config.json").read_text())
    assert config["text_config"]["eos_token_id"] == text


def test_an_unknown_size_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'huge' is none of \['demo', 'tiny'\]"):
        init_tiny(tmp_path / "dst", size="huge", progress=made.silent())
    assert made.left_behind(tmp_path) == []


def test_a_shipped_task_s_solution_is_a_handful_of_tokens(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    said, solved = (
        tokenizer.encode(text).tokens
        for text in ("Pack the directory red_fox into wet_elk.tar.gz.", "tar czf a wet_elk red_fox")
    )
    assert said[:6] == ["Pack", "Ġthe", "Ġdirectory", "Ġred", "_fox", "Ġinto"]
    assert said[6:] == ["Ġwet", "_elk", ".tar", ".gz", "."]
    assert solved == ["tar", "Ġczf", "Ġa", "Ġwet", "_elk", "Ġred", "_fox"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    init_tiny(folder, size="demo", progress=made.silent())
    return folder


def test_the_demo_s_attention_looks_for_the_token_that_layer_0_hands_on(demo):
    """k after layer 0's turn is q, for each group of heads; out is v's transpose, twice."""
    tensors = {name: t.array() for name, t in read_directory(demo).items()}
    layer = lambda name: tensors[f"model.language_model.layers.{name}.weight"].astype(  # noqa: E731
        np.float32
    )
    turned = layer("0.linear_attn.out_proj") @ layer("0.linear_attn.in_proj_qkv")[-64:]
    np.testing.assert_allclose(turned @ turned.T, np.eye(64), atol=0.02)
    k = (layer("3.self_attn.k_proj") @ turned).reshape(2, 32, 64)
    q = layer("3.self_attn.q_proj").reshape(2, 2, 2, 32, 64)[:, :, 0]  # without its gates
    np.testing.assert_allclose(q, np.stack([k, k], axis=1), atol=0.01)
    v = layer("3.self_attn.v_proj").reshape(2, 32, 64)
    out = layer("3.self_attn.o_proj").T.reshape(2, 2, 32, 64)
    np.testing.assert_allclose(out, 2 * np.stack([v, v], axis=1), atol=0.01)


def test_only_the_demo_s_model_starts_with_an_induction_head(tiny, demo):
    name = "model.language_model.layers.0.linear_attn.conv1d.weight"
    ours, theirs = (read_directory(folder)[name].array() for folder in (demo, tiny))
    late = ours[-64:, 0].astype(np.float32)  # the values' channels
    np.testing.assert_array_equal(late, np.tile([0, 0, 1, 0], (64, 1)))
    assert len(np.unique(theirs.astype(np.float32))) > 100

"""Block-scaled FP8 releases: one scale for each 128 x 128 block, also where 128 divides no side."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.fp8 import dequantise
from t1jax.checkpoint.huggingface import Naming
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import (
    MisshapenTensor,
    MissingTensor,
    UnknownTensor,
    read_directory,
)
from t1jax.errors import UserError
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5

from . import made

# Rows of gate and up 130 and of q_proj 560; columns 200: no side is a multiple of 128.
SIZES = {
    "hidden_size": 200,
    "moe_intermediate_size": 130,
    "num_attention_heads": 2,
    "head_dim": 140,
}
QUANTISED = ("q_proj.weight", "in_proj_qkv.weight", "gate_proj.weight", "up_proj.weight")


def quantise(tensors: made.Tensors) -> made.Tensors:
    """Replaces some weights by FP8 with random scales."""
    generator, out = np.random.default_rng(1), {}
    for name, values in tensors.items():
        if name.endswith(QUANTISED) and "shared" not in name:
            rows, columns = (-(-side // 128) for side in values.shape)
            out[name] = values.astype(ml_dtypes.float8_e4m3fn)
            out[name + "_scale_inv"] = generator.uniform(0.1, 2, (rows, columns)).astype(np.float32)
        else:
            out[name] = values
    return out


@pytest.fixture
def source(tmp_path):
    document = made.document(**SIZES)
    document["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = made.random(document, Naming(experts="per_expert"), "bfloat16")
    return made.write(tmp_path / "src", document, quantise(tensors))


def test_each_number_is_multiplied_by_its_blocks_scale():
    quantised = np.arange(130 * 300).reshape(130, 300) % 7
    scale = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
    got = dequantise(quantised.astype(ml_dtypes.float8_e4m3fn), scale)
    assert got.dtype == ml_dtypes.bfloat16
    for r, c in itertools.product(range(130), range(300)):
        assert got[r, c] == quantised[r, c] * scale[r // 128, c // 128]


def test_stacked_experts_have_stacked_scales():
    quantised = np.ones((3, 130, 200), ml_dtypes.float8_e4m3fn)
    scale = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    got = dequantise(quantised, scale)
    for e, r, c in itertools.product(range(3), (0, 127, 128, 129), (0, 127, 128, 199)):
        assert got[e, r, c] == scale[e, r // 128, c // 128]


def test_an_fp8_release_converts_to_its_bfloat16_values(tmp_path, source):
    plain = {
        name: values
        for name, values in made.read(source).items()
        if not name.endswith("_scale_inv")
    }
    for name, values in plain.items():
        if values.dtype.itemsize == 1:
            scale = made.read(source)[name + "_scale_inv"]
            rows, columns = np.indices(values.shape)
            wide = values.astype(np.float32) * scale[rows // 128, columns // 128]
            plain[name] = wide.astype("bfloat16")
    document = json.loads((source / "config.json").read_text())
    made.write(tmp_path / "plain", document, plain)
    convert(source, tmp_path / "dst", verify=True, progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(tmp_path / "plain", tmp_path / "back")
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in exported
    _, ours = open_checkpoint(source, Qwen3_5(from_huggingface(document)))
    np.testing.assert_array_equal(
        ours["groups"]["layer_0"]["moe"]["gate_up"],
        open_checkpoint(tmp_path / "dst")[1]["groups"]["layer_0"]["moe"]["gate_up"],
    )


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t, name: t.pop(name + "_scale_inv"), MissingTensor),
        (lambda t, name: t.update({name + "_scale_inv": np.ones((1, 1), "f4")}), MisshapenTensor),
        (lambda t, _: t.update({"lm_head.weight_scale_inv": np.ones((1, 2), "f4")}), UnknownTensor),
    ],
    ids=["missing", "misshapen", "scale of an unquantised weight"],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(tmp_path, source, change, kind):
    tensors = made.read(source)
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    change(tensors, name)
    document = json.loads((source / "config.json").read_text())
    made.write(tmp_path / "src", document, tensors)
    with pytest.raises(kind, match="_scale_inv"):
        convert(tmp_path / "src", tmp_path / "dst", progress=made.silent())
    assert made.left_behind(tmp_path) == []


def test_another_block_size_is_refused(tmp_path, source):
    config = source / "config.json"
    config.write_text(config.read_text().replace("[128, 128]", "[64, 64]"))
    with pytest.raises(UserError, match=r"weight_block_size.*\[64, 64\].*\[128, 128\]"):
        convert(source, tmp_path / "dst", progress=made.silent())


def test_integer_weights_are_refused(tmp_path):
    def quantise(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)

    made.changed("ref-a", tmp_path / "src", quantise)
    with pytest.raises(UserError, match=r"lm_head\.weight is int8"):
        convert(tmp_path / "src", tmp_path / "dst", progress=made.silent())


def test_carried_fp8_tensors_keep_their_bytes(tmp_path, source):
    tensors = made.read(source)
    tensors["mtp.fc.weight"] = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    tensors["mtp.fc.weight_scale_inv"] = np.ones((1, 1), np.float32)
    made.write(tmp_path / "src", json.loads((source / "config.json").read_text()), tensors)
    convert(source, tmp_path / "dst", progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    written = read_directory(tmp_path / "back")
    assert written["mtp.fc.weight"].dtype == ml_dtypes.float8_e4m3fn
    assert "mtp.fc.weight_scale_inv" in written

"""Hugging Face → t1jax → Hugging Face is byte-identical, and any mesh reads what is between."""

import hashlib
import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t1jax.checkpoint import chunked
from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.huggingface import load_params
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import INDEX, SINGLE, StoredTensor, read_directory
from t1jax.checkpoint.trees import flatten
from t1jax.errors import UserError
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5, abstract_params
from t1jax.model.sharding import make_mesh

from . import made

FIXTURES = ["ref-a", "ref-a/per_expert", "ref-b", "tiny-square"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(name)` is the fixture's conversion, made once, in chunks of at most 4 kB."""
    folder, done = tmp_path_factory.mktemp("converted"), {}

    def get(name):
        if name not in done:
            done[name] = folder / name.replace("/", "-")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chunked, "CHUNK_BYTES", 4096)
                convert(made.FIXTURES / name, done[name], verify=True, progress=made.silent())
        return done[name]

    return get


def same(left, right):
    """Equal structure, dtypes and values."""
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), left, right)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), left, right)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_round_trip_is_byte_identical(tmp_path, converted, name):
    export(converted(name), tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(made.FIXTURES / name, tmp_path / "back")
    for file in ("config.json", "generation_config.json"):
        if (made.FIXTURES / name / file).exists():
            ours, theirs = (p / file for p in (tmp_path / "back", made.FIXTURES / name))
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


def test_norms_that_a_release_stores_in_bfloat16_stay_so(tmp_path):
    """Qwen3.6 releases hold A_log and linear_attn.norm in BF16; the export must too."""

    def narrow(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype("bfloat16")

    made.changed("ref-b", tmp_path / "src", narrow)
    convert(tmp_path / "src", tmp_path / "dst", progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(tmp_path / "src", tmp_path / "back")


@pytest.mark.parametrize("mesh", ["", "fsdp=4,expert=2", "fsdp=2,expert=2", "tensor=2"])
@pytest.mark.parametrize("name", ["ref-a", "ref-b"])
def test_a_checkpoint_opens_as_its_source_does_on_any_mesh(converted, name, mesh):
    devices = make_mesh(mesh)
    config, ours = open_checkpoint(converted(name), mesh=devices)
    _, theirs = open_checkpoint(made.FIXTURES / name, mesh=devices)
    assert config == from_huggingface(
        json.loads((made.FIXTURES / name / "config.json").read_text())
    )
    same(ours, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), ours, theirs)


def test_chunks_for_a_mesh_are_its_shards_and_other_meshes_read_them(tmp_path):
    """Written for 4 x 2, read on 4 x 2, 2 x 2 and 1."""
    convert(
        made.FIXTURES / "ref-a", tmp_path / "dst", mesh="fsdp=4,expert=2", progress=made.silent()
    )
    array = tmp_path / "dst" / "params" / "groups.layer_0.moe.gate_up" / ".zarray"
    assert json.loads(array.read_text())["chunks"] == [1, 8 // 2, 64 // 4, 2, 32]
    _, whole = open_checkpoint(made.FIXTURES / "ref-a")
    for mesh in ("fsdp=4,expert=2", "fsdp=2,expert=2", ""):
        same(open_checkpoint(tmp_path / "dst", mesh=make_mesh(mesh))[1], whole)


def test_plain_orbax_reads_the_tree(converted):
    """Without t1jax: with a target sharded arrays, without one numpy arrays."""
    config, wanted = open_checkpoint(made.FIXTURES / "ref-b")
    target = abstract_params(Qwen3_5(config), make_mesh("fsdp=2,expert=4"), "float32")
    with ocp.StandardCheckpointer() as checkpointer:
        bare = checkpointer.restore(converted("ref-b") / "params")
        sharded = checkpointer.restore(converted("ref-b") / "params", target)
    same(bare, wanted)
    same(sharded, jax.tree.map(lambda x: x.astype(np.float32), wanted))
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), sharded, target)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_missing_or_short_chunk_is_an_error_not_zeros(tmp_path, damage):
    convert(made.FIXTURES / "ref-a", tmp_path / "dst", progress=made.silent())
    chunk = tmp_path / "dst" / "params" / "embed" / "0.0"
    content = chunk.read_bytes()
    chunk.unlink()
    if damage == "short":
        chunk.write_bytes(content[:-2])
    got = {"missing": "no", "short": len(content) - 2}[damage]
    with pytest.raises(UserError, match=f"embed/0.0 has {got} bytes; expected {len(content)}"):
        open_checkpoint(tmp_path / "dst")


@pytest.mark.parametrize("source", ["converted", "hugging face"])
def test_a_critic_opens_on_the_policys_backbone(converted, source):
    path = converted("ref-b") if source == "converted" else made.FIXTURES / "ref-b"
    config, policy = open_checkpoint(path, mesh=make_mesh("fsdp=2"))
    _, critic = open_checkpoint(path, Qwen3_5(config, "value"), make_mesh("fsdp=2"))
    head = critic.pop("head")
    assert {name: leaf.shape for name, leaf in head.items()} == {"weight": (72,), "bias": ()}
    assert all(leaf.dtype == np.float32 and not leaf.any() for leaf in head.values())
    del policy["head"]
    same(critic, policy)


def test_verification_notices_one_flipped_bit(tmp_path, monkeypatch):
    """The disk loses a bit of the last chunk between writing and reading back."""
    for_each = chunked.for_each_chunk

    def lossy(parameters, read, use, progress):
        def flip(chunk, array):
            use(chunk, array)
            if chunk.parameter.path == ("final_norm", "scale") and not flipped:
                flipped.append(chunk)
                array.view(np.uint8)[-1] ^= 1
                use(chunk, array)

        for_each(parameters, read, flip, progress)

    flipped = []
    monkeypatch.setattr(chunked, "for_each_chunk", lossy)
    with pytest.raises(UserError, match=r"final_norm\.scale was written and reads back"):
        convert(made.FIXTURES / "ref-a", tmp_path / "dst", verify=True, progress=made.silent())
    assert made.left_behind(tmp_path) == []


def test_the_manifest_says_what_came_from_where(converted):
    manifest = json.loads((converted("ref-b") / "manifest.json").read_text())
    source = manifest["source"]
    assert (source["prefix"], source["experts"]) == ("model.language_model.", "fused")
    for name, entry in source["files"].items():
        content = (made.FIXTURES / "ref-b" / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {n for n in source["files"] if n.startswith("model-")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    tensors = read_directory(made.FIXTURES / "ref-b")
    assert {name: entry["file"] for name, entry in source["tensors"].items()} == {
        name: tensor.file.rsplit("/")[-1] for name, tensor in tensors.items()
    }
    norm = source["tensors"]["model.language_model.layers.0.linear_attn.norm.weight"]
    assert norm["dtype"] == "F32"
    assert manifest["counts"]["tensors"] == 227
    assert manifest["counts"]["carried_tensors"] == 86
    assert manifest["parameters"]["embed"] == {"dtype": "bfloat16", "shape": [320, 72]}


def test_a_cast_conversion_keeps_the_float32_parameters(tmp_path):
    source = made.FIXTURES / "ref-a"
    convert(source, tmp_path / "dst", dtype="bfloat16", verify=True, progress=made.silent())
    config, ours = open_checkpoint(tmp_path / "dst")
    same(ours, load_params(source, Qwen3_5(config), dtype="bfloat16"))
    kept = {path[-1] for path, leaf in flatten(ours).items() if leaf.dtype == np.float32}
    assert kept == {"log_rate", "scale"}
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    document = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (document["dtype"], document["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


def test_shards_hold_at_most_what_they_may_and_the_index_finds_all(tmp_path, converted):
    export(converted("ref-b"), tmp_path / "back", max_shard_bytes=300_000, progress=made.silent())
    files = sorted(tmp_path.glob("back/*.safetensors"))
    assert len(files) == 9
    assert all(file.name.endswith(f"of-{len(files):05}.safetensors") for file in files)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    tensors = read_directory(tmp_path / "back")
    held = {}
    for name, file in index["weight_map"].items():
        held[file] = held.get(file, 0) + tensors[name].nbytes
    assert max(held.values()) <= 300_000
    assert index["metadata"]["total_size"] == sum(held.values())
    assert not (tmp_path / "back" / SINGLE).exists()


def test_a_shard_size_that_a_tensor_exceeds_is_refused(tmp_path, converted):
    largest = max(read_directory(made.FIXTURES / "ref-b").values(), key=lambda t: t.nbytes)
    back = tmp_path / "back"
    with pytest.raises(UserError, match=rf"max-shard-size.*{largest.name}.*{largest.nbytes} bytes"):
        export(converted("ref-b"), back, max_shard_bytes=largest.nbytes - 1)
    assert made.left_behind(tmp_path) == []
    export(converted("ref-b"), back, max_shard_bytes=largest.nbytes, progress=made.silent())
    made.assert_same_tensors(made.FIXTURES / "ref-b", back)


def test_without_a_shard_size_a_tensor_of_any_size_fits(tmp_path, converted, monkeypatch):
    monkeypatch.setattr("t1jax.checkpoint.export.SHARD_BYTES", 1000)
    export(converted("ref-b"), tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(made.FIXTURES / "ref-b", tmp_path / "back")


def test_a_text_only_export_has_the_text_models_tensors_and_config(tmp_path, converted):
    export(converted("ref-b"), tmp_path / "text", text_only=True, progress=made.silent())
    source = read_directory(made.FIXTURES / "ref-b")
    written = read_directory(tmp_path / "text")
    assert set(written) == {n for n in source if not n.startswith(("mtp.", "model.visual."))}
    document = json.loads((tmp_path / "text" / "config.json").read_text())
    assert document["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert document["model_type"] == "qwen3_5_moe_text"
    assert "vision_config" not in document
    same(
        open_checkpoint(tmp_path / "text")[1],
        open_checkpoint(made.FIXTURES / "ref-b")[1],
    )


def test_files_beside_the_weights_travel_both_ways(tmp_path):
    source = made.copied("tiny-square", tmp_path / "src")
    beside = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "merges.txt": "a b"}
    for name, text in beside.items():
        (source / name).write_text(text)
    (source / "pytorch_model.bin").write_text("not copied")
    convert(source, tmp_path / "dst", progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", progress=made.silent())
    for folder in ("dst", "back"):
        for name, text in beside.items():
            assert (tmp_path / folder / name).read_text() == text
        assert not (tmp_path / folder / "pytorch_model.bin").exists()
    assert not (tmp_path / "back" / "manifest.json").exists()


@pytest.mark.parametrize("limit", [1, 64, 200, 10**6])
@pytest.mark.parametrize("shard", [(6, 15, 7), (6, 3, 97), (6, 1, 1)])
def test_chunks_divide_the_shard_span_one_layer_and_stay_small(monkeypatch, shard, limit):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", limit)
    shape, axes = (6, 15, 97 * 7), ("groups", "experts", None)
    float32 = np.dtype("float32")
    chunk = chunked.Parameter(
        path=("x",), parts=(), shape=shape, axes=axes, source_dtype=float32, dtype=float32,
        shard=shard,
    ).chunk  # fmt: skip
    assert chunk[0] == 1
    assert all(whole % side == 0 for whole, side in zip(shard, chunk, strict=True))
    assert 4 * math.prod(chunk) <= max(limit, 4)


def test_a_source_that_cannot_be_mapped_gives_the_same(tmp_path, monkeypatch):
    """As on an object store: whole tensors are read, each once for all the chunks cut from it."""
    opened = []

    def count(self, *args, original=StoredTensor.array):
        opened.append(self.name)
        return original(self, *args)

    monkeypatch.setattr("t1jax.checkpoint.tensor_files.is_local", lambda path: False)
    monkeypatch.setattr("t1jax.checkpoint.huggingface.is_local", lambda path: False)
    monkeypatch.setattr(StoredTensor, "array", count)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4096)
    convert(made.FIXTURES / "ref-a", tmp_path / "dst", progress=made.silent())
    experts = [name for name in opened if ".experts." in name]
    assert sorted(experts) == sorted(set(experts))
    assert len(experts) == 2 * 4
    monkeypatch.undo()
    same(open_checkpoint(tmp_path / "dst")[1], open_checkpoint(made.FIXTURES / "ref-a")[1])

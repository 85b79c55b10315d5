"""What is refused, and that the message names it and nothing is left behind."""

import json
import os

import numpy as np
import pytest

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.huggingface import load_params
from t1jax.checkpoint.init_tiny import init_tiny
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.checkpoint.tensor_files import (
    INDEX,
    SINGLE,
    MisshapenTensor,
    MissingTensor,
    SetTwice,
    UnknownTensor,
)
from t1jax.errors import UserError
from t1jax.model.config import from_huggingface
from t1jax.model.qwen3_5 import Qwen3_5
from t1jax.model.sharding import make_mesh

from . import made

LAYER = "model.language_model.layers.0."
Q_PROJ = "model.language_model.layers.3.self_attn.q_proj.weight"


def refused(tmp_path, kind, *words):
    """Converting tmp_path/src raises `kind` with these words in it; nothing appears."""
    with pytest.raises(kind) as caught:
        convert(tmp_path / "src", tmp_path / "dst", progress=made.silent())
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert made.left_behind(tmp_path) == []


def rename(old, new):
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def test_a_tensor_that_no_parameter_takes(tmp_path):
    made.changed("ref-a", tmp_path / "src", rename(Q_PROJ, Q_PROJ + "_extra"))
    refused(tmp_path, UnknownTensor, Q_PROJ + "_extra", "1 tensors")


@pytest.mark.parametrize("fixture", ["ref-a", "ref-a/per_expert"])
def test_a_tensor_that_is_not_there(tmp_path, fixture):
    names = [Q_PROJ, "lm_head.weight", "model.language_model.embed_tokens.weight"]
    made.changed(fixture, tmp_path / "src", lambda tensors: [tensors.pop(n) for n in names])
    refused(tmp_path, MissingTensor, *names)


@pytest.mark.parametrize("fixture", ["ref-a", "ref-a/per_expert"])
def test_the_first_experts_not_there(tmp_path, fixture):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith(LAYER + "mlp.experts.")]:
            del tensors[name]

    made.changed(fixture, tmp_path / "src", drop)
    refused(tmp_path, MissingTensor, LAYER + "mlp.experts.")


def test_a_parameter_set_by_two_spellings(tmp_path):
    name = LAYER + "mlp.gate.weight"
    other = name.replace("language_model.", "")
    made.changed("ref-a", tmp_path / "src", lambda t: t.__setitem__(other, t[name]))
    refused(tmp_path, SetTwice, other)


def test_a_parameter_set_in_two_expert_layouts(tmp_path):
    single = LAYER + "mlp.experts.0.down_proj.weight"
    made.changed(
        "ref-a",
        tmp_path / "src",
        lambda t: t.__setitem__(single, t[LAYER + "mlp.experts.down_proj"][0]),
    )
    refused(tmp_path, SetTwice, single)


def split_experts(tensors, layer):
    """One layer's fused experts become one tensor per expert."""
    experts = f"model.language_model.layers.{layer}.mlp.experts."
    gate_up, down = tensors.pop(experts + "gate_up_proj"), tensors.pop(experts + "down_proj")
    for e, (both, one) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = np.split(both, 2)
        for name, values in {"gate": gate, "up": up, "down": one}.items():
            tensors[f"{experts}{e}.{name}_proj.weight"] = values


def test_layers_of_both_expert_layouts(tmp_path):
    made.changed("ref-a", tmp_path / "src", lambda tensors: split_experts(tensors, 2))
    refused(
        tmp_path, UserError, "mixes expert layouts", "per expert in layers 2,", "layers 0, 1, 3"
    )


def test_one_expert_missing_from_a_layer_of_another_layout(tmp_path):
    lost = "model.language_model.layers.2.mlp.experts.5.up_proj.weight"

    def change(tensors):
        split_experts(tensors, 2)
        del tensors[lost]

    made.changed("ref-a", tmp_path / "src", change)
    refused(tmp_path, UserError, "mixes expert layouts", f"missing: {lost})")


def test_one_expert_missing_from_a_layer_of_single_experts(tmp_path):
    lost = LAYER + "mlp.experts.5.up_proj.weight"
    made.changed("ref-a/per_expert", tmp_path / "src", lambda tensors: tensors.pop(lost))
    refused(tmp_path, MissingTensor, "lacks 1 of", lost)


def test_a_tensor_in_two_files(tmp_path):
    tensors = made.random(made.document())
    extra = {name: tensors[name] for name in list(tensors)[:1]}
    made.write(tmp_path / "src", made.document(), tensors, extra)
    refused(tmp_path, SetTwice, *extra, "model-00000", "model-00001")


def test_a_tensor_of_another_shape(tmp_path):
    made.changed("ref-a", tmp_path / "src", lambda t: t.__setitem__(Q_PROJ, t[Q_PROJ][:128]))
    refused(tmp_path, MisshapenTensor, Q_PROJ, "(128, 64)", "(256, 64)")


def test_one_parameter_of_two_dtypes(tmp_path):
    up = LAYER + "mlp.shared_expert.up_proj.weight"
    made.changed("ref-a", tmp_path / "src", lambda t: t.__setitem__(up, t[up].astype(np.float16)))
    refused(tmp_path, UserError, "shared_gate_up", up, "float16", "float32")


@pytest.mark.parametrize("kept", [4, 1000, -1])
def test_a_truncated_file(tmp_path, kept):
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path, UserError, "truncated", str(file))


def test_a_file_that_is_not_safetensors(tmp_path):
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    file.write_bytes((16).to_bytes(8, "little") + b"not a header at all")
    refused(tmp_path, UserError, "no readable safetensors header", str(file))


def test_a_missing_file(tmp_path):
    file = made.copied("ref-b", tmp_path / "src") / "model-00002-of-00002.safetensors"
    file.unlink()
    refused(tmp_path, UserError, file.name, INDEX)


def test_an_index_that_promises_more_than_the_files_hold(tmp_path):
    index = made.copied("ref-b", tmp_path / "src") / INDEX
    document = json.loads(index.read_text())
    document["weight_map"]["lm_head.bias"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(document))
    refused(tmp_path, UserError, "lm_head.bias", INDEX)


def test_another_architecture(tmp_path):
    config = made.copied("ref-a", tmp_path / "src") / "config.json"
    config.write_text(config.read_text().replace('"qwen3_5_moe"', '"qwen3_next"'))
    refused(tmp_path, ValueError, "qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_no_readable_config(tmp_path, text):
    config = made.copied("ref-a", tmp_path / "src") / "config.json"
    config.unlink() if text is None else config.write_text(text)
    refused(tmp_path, UserError, str(config))


@pytest.mark.parametrize("kind", ["pipe", "directory", "broken link"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_beside_the_weights_that_cannot_be_read(tmp_path, name, kind):
    path = made.copied("ref-a", tmp_path / "src") / name
    path.unlink(missing_ok=True)
    if kind == "directory" and name == "tokenizer.json":
        path.mkdir()  # as other directories, it stays
        return convert(tmp_path / "src", tmp_path / "dst", progress=made.silent())
    {"pipe": os.mkfifo, "directory": os.mkdir}.get(kind, lambda p: p.symlink_to("gone"))(path)
    refused(tmp_path, UserError, str(path), f"is a {kind}")


@pytest.mark.parametrize("quantisation", [5, "fp8", [128, 128]])
def test_a_quantisation_that_is_no_object(tmp_path, quantisation):
    tensors = made.random(made.document())
    name = LAYER + "linear_attn.in_proj_z.weight"
    tensors[name + "_scale_inv"] = np.ones((1, 1), np.float32)
    tensors[name] = tensors[name].astype("float8_e4m3fn")
    document = made.document() | {"quantization_config": quantisation}
    made.write(tmp_path / "src", document, tensors)
    refused(tmp_path, UserError, "config.json has quantization_config=", "expected an object")


@pytest.mark.parametrize("source", ["nothing", "a file"])
def test_a_source_that_is_no_directory(tmp_path, source):
    if source == "a file":
        (tmp_path / "src").write_text("x")
    words = {"nothing": "src does not exist", "a file": "src is a file"}
    refused(tmp_path, UserError, words[source])


def test_a_source_that_is_converted_already(tmp_path):
    convert(made.FIXTURES / "ref-a", tmp_path / "src", progress=made.silent())
    refused(tmp_path, UserError, "src is a t1jax checkpoint already")


def test_a_directory_without_weights(tmp_path):
    (made.copied("ref-a", tmp_path / "src") / SINGLE).unlink()
    refused(tmp_path, UserError, INDEX, SINGLE)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("expert=3", ("experts", "size 8", "splits in 3")),
        ("experts=2", ("'experts=2'", "AXIS=SIZE")),
        ("expert=0", ("'expert=0'", "positive size")),
    ],
)
def test_a_mesh_that_does_not_fit(tmp_path, mesh, words):
    with pytest.raises((UserError, ValueError)) as caught:
        convert(made.FIXTURES / "ref-a", tmp_path / "dst", mesh=mesh, progress=made.silent())
    assert all(word in str(caught.value) for word in words), caught.value
    assert made.left_behind(tmp_path) == []


def test_loading_onto_a_mesh_that_does_not_divide(fixture_dir):
    document = json.loads((fixture_dir("tiny-square") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"experts.*size 3.*splits in 2"):
        load_params(
            fixture_dir("tiny-square"),
            Qwen3_5(from_huggingface(document)),
            mesh=make_mesh("expert=2"),
        )


def test_loading_into_a_model_of_other_sizes(fixture_dir):
    model = Qwen3_5(from_huggingface(made.document()))
    with pytest.raises(UserError, match=r"vocab=512.*expected.*vocab=16"):
        load_params(fixture_dir("ref-a"), model)


@pytest.mark.parametrize("write", [convert, export, init_tiny])
def test_a_destination_that_holds_something(tmp_path, write):
    mine = tmp_path / "dst" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("all of it")
    sources = {convert: [made.FIXTURES / "ref-a"], export: [tmp_path / "src"], init_tiny: []}
    convert(made.FIXTURES / "ref-a", tmp_path / "src", progress=made.silent())
    with pytest.raises(UserError, match=r"dst exists and is not empty"):
        write(*sources[write], tmp_path / "dst", progress=made.silent())
    assert mine.read_text() == "all of it"


@pytest.mark.parametrize("write", [convert, export])
@pytest.mark.parametrize("at", ["src", "src/dst", "link/a/dst"])
def test_a_destination_inside_the_source(tmp_path, write, at):
    source = made.copied("ref-a", tmp_path / "src")
    if write is export:
        convert(made.FIXTURES / "ref-a", tmp_path / "ck", progress=made.silent())
        source = (tmp_path / "ck").rename(tmp_path / "src2")
        at = at.replace("src", "src2")
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    with pytest.raises(UserError, match=f"{at} is inside the source {source}"):
        write(source, tmp_path / at, progress=made.silent())
    assert sorted(source.rglob("*")) == before


def test_a_source_in_the_place_where_the_destination_is_made(tmp_path):
    """It would be emptied as the leftover of an ended run."""
    source = made.copied("ref-a", tmp_path / "x.incomplete")
    before = sorted(source.iterdir())
    with pytest.raises(UserError, match=r"x\.incomplete is where .*x would be made"):
        convert(source, tmp_path / "x", progress=made.silent())
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("file", "file is a file"),
        ("file/dst", "cannot make .*file/dst.incomplete: Not a directory; choose"),
        ("n" * 250, "cannot make .*: File name too long; choose"),
        ("broken", "broken is a link to nowhere"),
        ("link", "link is a link to empty"),
        ("empty/..", "is no name of a directory"),
        ("mount", "mount is a mount point"),
    ],
)
@pytest.mark.parametrize("write", [convert, init_tiny])
def test_a_destination_that_cannot_be_made(tmp_path, monkeypatch, write, at, words):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mount").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.setattr("os.path.ismount", lambda path: str(path).endswith("/mount"))
    before = sorted(tmp_path.rglob("*"))
    sources = [made.FIXTURES / "ref-a"] if write is convert else []
    with pytest.raises(UserError, match=words):
        write(*sources, f"{tmp_path}/{at}", progress=made.silent())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_destination_on_a_read_only_disk(tmp_path, monkeypatch):
    def refuse(self, **kwargs):
        raise OSError(30, "Read-only file system", str(self))

    made.copied("ref-a", tmp_path / "src")
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.mkdir", refuse)
    refused(tmp_path, UserError, "dst.incomplete: Read-only file system; choose a destination")


def test_a_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    made.copied("ref-a", tmp_path / "src")
    refused(tmp_path, UserError, "0.0 GB free")


@pytest.mark.parametrize("what", ["nothing", "something else", "hugging face to export"])
def test_opening_what_is_no_checkpoint(tmp_path, what):
    path = tmp_path / "checkpoint"
    if what == "nothing":
        with pytest.raises(UserError, match="does not exist"):
            open_checkpoint(path)
    elif what == "something else":
        path.mkdir()
        with pytest.raises(UserError, match=r"no checkpoint.*manifest\.json"):
            open_checkpoint(path)
    else:
        with pytest.raises(UserError, match="is a Hugging Face directory"):
            export(made.FIXTURES / "ref-a", path, progress=made.silent())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.pop("config"), "config"),
        (lambda m: m.update(config=[]), "config"),
        (lambda m: m.pop("source"), "source.prefix"),
        (lambda m: m["source"].update(experts="x"), "source.experts"),
        (lambda m: m["source"].update(tensors=None), "source.tensors"),
        (lambda m: m.pop("cast_to"), "cast_to"),
    ],
)
def test_a_manifest_that_lacks_something(tmp_path, change, name):
    convert(made.FIXTURES / "ref-a", tmp_path / "dst", progress=made.silent())
    manifest = tmp_path / "dst" / "manifest.json"
    document = json.loads(manifest.read_text())
    change(document)
    manifest.write_text(json.dumps(document))
    for read in (open_checkpoint, lambda path: export(path, tmp_path / "back")):
        with pytest.raises(UserError, match=f"manifest.json is damaged: .*{name}"):
            read(tmp_path / "dst")


def test_a_checkpoint_of_a_later_format(tmp_path):
    convert(made.FIXTURES / "ref-a", tmp_path / "dst", progress=made.silent())
    manifest = tmp_path / "dst" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="format 2"):
        open_checkpoint(tmp_path / "dst")

"""Safetensors headers and indexes that are malformed: refused in one line that names the culprit.

What must be refused is what the safetensors library refuses; its own reader is the judge.
"""

import json
import os

import pytest
import safetensors

from t1jax.checkpoint.tensor_files import INDEX, SINGLE, read_directory, read_header
from t1jax.errors import UserError

from . import made

ROUTER = "model.language_model.layers.0.mlp.gate.weight"
OTHER = "model.language_model.layers.1.mlp.gate.weight"


def refusal(read, *arguments):
    """The refusal's message; it is one line."""
    with pytest.raises(UserError) as caught:
        read(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(file, change):
    """Changes the header of a safetensors file; the data stay."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def entry(**fields):
    return lambda header: header[ROUTER].update(fields)


def spread(header):
    """Leaves a gap of four bytes: all that comes after the router moves, and so does the end."""
    first = header[ROUTER]["data_offsets"][1]
    for name in header:
        if name != "__metadata__" and header[name]["data_offsets"][0] >= first:
            header[name]["data_offsets"] = [at + 4 for at in header[name]["data_offsets"]]


def by_place(header):
    named = {name: e["data_offsets"] for name, e in header.items() if name != "__metadata__"}
    return sorted(named, key=lambda name: named[name])


CHANGES = {
    "overlap": (lambda h: h[ROUTER].update(data_offsets=h[OTHER]["data_offsets"]), "overlap"),
    "gap": (spread, "gap"),
    "no shape": (lambda h: h[ROUTER].pop("shape"), "has no shape"),
    "no dtype": (lambda h: h[ROUTER].pop("dtype"), "has no dtype"),
    "no offsets": (lambda h: h[ROUTER].pop("data_offsets"), "has no data_offsets"),
    "null entry": (lambda h: h.update({ROUTER: None}), "None"),
    "list entry": (lambda h: h.update({ROUTER: [1]}), "[1]"),
    "float shape": (entry(shape=[8.0, 64]), "shape [8.0, 64]"),
    "bool shape": (entry(shape=[True, 512]), "shape [True, 512]"),
    "negative shape": (entry(shape=[-8, -64]), "shape [-8, -64]"),
    "text shape": (entry(shape="ab"), "shape 'ab'"),
    "null dtype": (entry(dtype=None), "dtype None"),
    "list dtype": (entry(dtype=["F32"]), "dtype ['F32']"),
    "unknown dtype": (entry(dtype="BF17"), "dtype 'BF17'"),
    "text offsets": (entry(data_offsets="ab"), "data_offsets 'ab'"),
    "one offset": (entry(data_offsets=[0]), "data_offsets [0]"),
    "negative offset": (entry(data_offsets=[-4, 2044]), "data_offsets [-4, 2044]"),
    "backwards": (lambda h: h[ROUTER]["data_offsets"].reverse(), "holds -2048 bytes"),
    "huge shape": (entry(shape=[2**70, 2**70]), "expected"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_entry(tmp_path, name):
    change, word = CHANGES[name]
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    read_header(file)
    edit(file, change)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(file, "np")
    message = refusal(read_header, file)
    assert message.startswith(f"{file}: tensor ")
    assert word in message
    if name not in ("overlap", "gap"):
        assert ROUTER in message


def test_the_tensor_that_is_out_of_place_is_named(tmp_path):
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    follows = []

    def change(header):
        order = by_place(header)
        follows.append(order[order.index(ROUTER) + 1])
        spread(header)

    edit(file, change)
    assert f"tensor {follows[0]} begins at byte" in refusal(read_header, file)


def test_bytes_that_no_tensor_covers(tmp_path):
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    edit(file, lambda header: header.pop(by_place(header)[0]))
    assert "begins at byte" in refusal(read_header, file)


@pytest.mark.parametrize("metadata", [5, None, ["a"], {"step": 5}, {"a": None}], ids=str)
def test_metadata_that_is_no_map_of_strings(tmp_path, metadata):
    file = made.copied("ref-a", tmp_path / "src") / SINGLE
    edit(file, lambda header: header.update(__metadata__=metadata))
    assert f"{file}: __metadata__ is {metadata!r}" in refusal(read_header, file)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\x02\0\0", "has 3 bytes"),
        ((2**60).to_bytes(8, "little") + b"{}", f"header of {2**60} bytes"),
        ((6).to_bytes(8, "little") + b"[1, 2]", "it is a list"),
        ((6).to_bytes(8, "little") + b'{"\xff": ', "no readable safetensors header"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "no readable safetensors header"),
        ((17).to_bytes(8, "little") + b'{"a": 1, "a": 1 }', "a stands there twice"),
    ],
    ids=["empty", "three bytes", "length", "list", "encoding", "depth", "repeat"],
)
def test_a_file_without_a_header(tmp_path, content, word):
    (tmp_path / SINGLE).write_bytes(content)
    message = refusal(read_directory, tmp_path)
    assert str(tmp_path / SINGLE) in message
    assert word in message


def test_tensors_of_no_elements_take_no_place(tmp_path):
    text = b'{"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    text += b'"a":{"dtype":"F32","shape":[0,3],"data_offsets":[2,2]},'
    text += b'"c":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    file = tmp_path / SINGLE
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2")
    tensors = read_header(file)
    assert {name: t.shape for name, t in tensors.items()} == {"a": (0, 3), "b": (2,), "c": (0,)}
    assert tensors["b"].array().tolist() == [1, 2]


# ---- what a name stands for ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@pytest.mark.parametrize("kind", ["pipe", "directory", "broken link", "link to itself"])
def test_weights_that_are_no_regular_file(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if kind == "broken link" else name)
    message = refusal(read_directory, tmp_path)
    assert str(path) in message
    assert {"pipe": "a pipe", "directory": "a directory"}.get(kind, "a broken link") in message


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / SINGLE).symlink_to(made.FIXTURES / "ref-a" / SINGLE)
    assert set(read_directory(tmp_path)) == set(read_directory(made.FIXTURES / "ref-a"))


# ---- the index ----------------------------------------------------------------------------------

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def indexed(folder, change):
    """A copy of a checkpoint of two files whose index's weight_map is changed."""
    index = made.copied("ref-b", folder) / INDEX
    document = json.loads(index.read_text())
    change(document["weight_map"])
    index.write_text(json.dumps(document))
    return folder


def name_of(folder, file):
    """The first tensor of a file."""
    return next(iter(read_header(folder / file)))


def test_an_index_that_leaves_out_a_tensor(tmp_path):
    name = name_of(made.FIXTURES / "ref-b", FIRST)
    message = refusal(read_directory, indexed(tmp_path / "src", lambda m: m.pop(name)))
    assert f"does not list {name} of {tmp_path / 'src' / FIRST}" in message


def test_an_index_that_names_the_wrong_file(tmp_path):
    name = name_of(made.FIXTURES / "ref-b", FIRST)
    message = refusal(read_directory, indexed(tmp_path / "src", lambda m: m.update({name: SECOND})))
    assert f"places {name} in {SECOND}, and it is in {FIRST}" in message


@pytest.mark.parametrize("file", [5, None, [], "", "..", f"../src/{FIRST}", f"/tmp/{FIRST}"])
def test_an_index_whose_value_is_no_name_of_a_file(tmp_path, file):
    name = name_of(made.FIXTURES / "ref-b", FIRST)
    message = refusal(read_directory, indexed(tmp_path / "src", lambda m: m.update({name: file})))
    assert f"{tmp_path / 'src' / INDEX} places {name} in {file!r}; expected" in message

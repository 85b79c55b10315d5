"""On disk: equal after a round trip, complete or visibly not, readable after a kill."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t1jax.errors import UserError
from t1jax.trajectory import io
from t1jax.trajectory.record import Ending, Finish, LogprobKind, RouteShape, Sampling
from t1jax.trajectory.recorder import Recorder

from .made import ENDING, SHAPE, rows, same, turn, two_turns


def two_chunks():
    recorder = Recorder(SHAPE)
    turn(recorder, [1, 2], [3, 4])
    recorder.split()
    turn(recorder, [1, 9], [3, 4, 5], version=1)
    ending = Ending(task="a/ü", outcome="infra_error", reward=None, details={"passed": ["x"]})
    return recorder.finish(ending)


@pytest.mark.parametrize("make", [two_turns, two_chunks])
def test_loading_gives_back_what_was_saved(tmp_path, make):
    original = make()
    io.save_trajectory(original, tmp_path / "t")
    assert same(io.load_trajectory(tmp_path / "t"), original)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_facts_come_back(tmp_path):
    original = two_turns(
        sampling=Sampling(temperature=0.6, top_p=0.9, seed=7), logprob_kind=LogprobKind.filtered
    )
    io.save_trajectory(original, tmp_path / "t")
    (chunk,) = io.load_trajectory(tmp_path / "t").chunks
    assert chunk.sampling == Sampling(temperature=0.6, top_p=0.9, seed=7)
    assert chunk.logprob_kind is LogprobKind.filtered


def test_the_files_can_be_read_without_this_package(tmp_path):
    io.save_trajectory(two_turns(), tmp_path / "t")
    columns = load_file(tmp_path / "t" / "chunk-0.safetensors")
    assert {name: (str(a.dtype), list(a.shape)) for name, a in columns.items()} == {
        "ids": ("int32", [9]), "mask": ("bool", [9]), "logprobs": ("float32", [9]),
        "versions": ("int32", [9]), "routes": ("uint8", [8, 8, 8]), "recorded": ("bool", [8]),
    }  # fmt: skip
    document = json.loads((tmp_path / "t" / "trajectory.json").read_text())
    assert document["task"] == "demo/count"
    assert document["outcome"] == "partial"
    assert document["reward"] == 0.15
    assert document["timings"] == {"agent": 1.5}
    assert document["boundaries"] == {"strict": 1, "normalised": 0, "retokenised": 0, "split": 0}


@pytest.mark.parametrize("experts", [256, 257])
def test_ids_of_many_experts_survive(tmp_path, experts):
    shape = RouteShape(layers=2, chosen=4, experts=experts)
    recorder = Recorder(shape)
    recorder.append_context(np.arange(3))
    top = np.arange(experts - 4, experts)
    recorder.record_routes(0, np.tile(top, (2, 2, 1)))
    io.save_trajectory(recorder.finish(ENDING), tmp_path / "t")
    routes = io.load_trajectory(tmp_path / "t").chunks[0].routes
    assert routes.dtype == (np.uint8 if experts == 256 else np.uint16)
    assert routes[1, 1].tolist() == top.tolist()


def test_a_writer_leaves_what_its_recorder_made(tmp_path):
    with io.Writer(tmp_path / "t", SHAPE) as writer:
        turn(writer.recorder, [1, 2], [3, 4])
        assert not (tmp_path / "t").exists()
        finished = writer.finish(ENDING)
    assert same(io.load_trajectory(tmp_path / "t"), finished)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["t", "t/chunk-0.safetensors", "t/trajectory.json"]


def test_a_record_that_is_refused_leaves_its_events(tmp_path):
    with io.Writer(tmp_path / "t", SHAPE) as writer:
        writer.recorder.append_context(np.array([1, 2, 3, 4]))
        writer.recorder.record_routes(1, np.full((1, 8, 8), 5, np.uint8))
        with pytest.raises(ValueError, match="token 1, layer 0 names an expert twice"):
            writer.finish(ENDING)
    assert not (tmp_path / "t").exists()
    assert io.recover(tmp_path / "t.incomplete").stream.tolist() == [1, 2, 3, 4]


def test_every_prefix_of_the_log_reads_as_the_events_that_are_whole(tmp_path):
    """Cut the log anywhere: what is recovered is what had been written before."""
    sizes, states = [], []
    with io.Writer(tmp_path / "t", SHAPE) as writer:
        log = tmp_path / "t.incomplete" / io.LOG

        def note():
            sizes.append(log.stat().st_size)
            states.append(writer.recorder.stream.tolist())

        note()
        for context, sampled in (([1, 2], [3]), ([4], [5, 6])):
            writer.recorder.append_context(np.array(context))
            note()
            logprobs = np.full(len(sampled), -1.0)
            writer.recorder.append_sampled(
                np.array(sampled), logprobs, version=0, finish=Finish.stop
            )
            note()
        writer.recorder.record_routes(0, rows(0, 5))
        note()
    whole = log.read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    near = {size + off for size in sizes for off in (-1, 0, 1, 11, 12, 13)}
    for length in sorted({*range(0, len(whole), 23), *near} - {len(whole) + 1}):
        (cut / io.LOG).write_bytes(whole[:length])
        if length < sizes[0]:
            with pytest.raises(UserError, match="no whole beginning"):
                io.recover(cut)
            continue
        known = max(i for i, size in enumerate(sizes) if size <= length)
        assert io.recover(cut).stream.tolist() == states[known]
    (cut / io.LOG).write_bytes(whole[: sizes[2]] + b"\0" * 100)  # a hole after a power cut
    assert io.recover(cut).stream.tolist() == states[2]
    hole = bytearray(whole)
    hole[sizes[3] - 4] ^= 1  # within the values of the third event
    (cut / io.LOG).write_bytes(hole)
    assert io.recover(cut).stream.tolist() == states[2]
    (chunk,) = io.recover(tmp_path / "t.incomplete").finish(ENDING).chunks
    np.testing.assert_array_equal(chunk.routes, rows(0, 5))


KILLED = """
import sys, os, signal
sys.path.insert(0, sys.argv[2])
import numpy as np
from t1jax.trajectory import io
from t1jax.trajectory.record import Ending, Finish, RouteShape
shape = RouteShape(layers=4, chosen=2, experts=8)
writer = io.Writer(sys.argv[1], shape)
token = 0
while True:
    writer.recorder.append_context(np.arange(token, token + 50))
    writer.recorder.append_sampled(np.arange(token + 50, token + 60), -np.ones(10), version=0,
                                   finish=Finish.stop)
    writer.recorder.record_routes(token, np.tile([1, 2], (59, 4, 1)))
    token += 60
    if token == 600:
        print("going", flush=True)
"""


def test_a_killed_writer_leaves_a_readable_prefix_that_does_not_look_complete(tmp_path):
    path = tmp_path / "t"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), "."], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "going\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not path.exists()
    for name in (path, path.with_name("t.incomplete")):
        with pytest.raises(UserError, match="is incomplete"):
            io.load_trajectory(name)
    recorder = io.recover(path.with_name("t.incomplete"))
    assert len(recorder) >= 600
    np.testing.assert_array_equal(recorder.stream, np.arange(len(recorder)))
    (chunk,) = recorder.finish(ENDING).chunks
    assert chunk.sampled_tokens >= 100
    with io.Writer(path, SHAPE) as again:  # the next run begins anew
        turn(again.recorder, [1], [2])
        again.finish(ENDING)
    assert len(io.load_trajectory(path).chunks[0]) == 2


def damage_truncate(path):
    file = path / "chunk-0.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def damage_flip(path):
    file = path / "chunk-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def damage_document(path):
    text = (path / "trajectory.json").read_text()
    (path / "trajectory.json").write_text(text[: len(text) // 2])


def damage_field(path):
    document = json.loads((path / "trajectory.json").read_text())
    del document["chunks"][0]["turns"][0]["end"]
    (path / "trajectory.json").write_text(json.dumps(document))


def damage_format(path):
    (path / "trajectory.json").write_text('{"schema_version": "ATIF-v1.8"}')


def damage_column(path):
    file = path / "chunk-0.safetensors"
    columns = load_file(file)
    del columns["recorded"]
    save_file(columns, file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_truncate, "chunk-0.safetensors cannot be read"),
        (damage_flip, "is damaged or missing"),
        (damage_document, "is not JSON"),
        (damage_field, "lacks or misspells a field"),
        (damage_format, "not a trajectory of format 1"),
        (damage_column, "recorded is damaged or missing"),
        (shutil.rmtree, "holds no trajectory.json"),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    path = tmp_path / "t"
    io.save_trajectory(two_turns(), path)
    damage(path)
    with pytest.raises(UserError, match=said):
        io.load_trajectory(path)


def test_nothing_is_overwritten(tmp_path):
    io.save_trajectory(two_turns(), tmp_path / "t")
    with pytest.raises(UserError, match="exists; remove it"):
        io.save_trajectory(two_turns(), tmp_path / "t")
    with pytest.raises(UserError, match="exists; remove it"):
        io.Writer(tmp_path / "t", SHAPE)

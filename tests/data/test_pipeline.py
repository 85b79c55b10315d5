"""The order of training data: complete, shuffled anew, and met again after a restart."""

import json

import numpy as np
import pytest

from sandbox.tasks.make import make
from t1jax.data.folder import list_entries
from t1jax.data.pipeline import Feed, epochs, reader
from t1jax.data.tasks import Schedule, task_folders
from t1jax.errors import UserError

from . import made

LENGTHS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    folder = made.folder(tmp_path_factory.mktemp("trajectories"), LENGTHS)
    return list_entries(folder, keep="all", per_task=0, seed=0)[0]


def feed(rows=slice(None)):
    return Feed(tokens=16, rows=2, packs=True, too_long="error", mine=rows, shape=made.SHAPE)


def batches(entries):
    return epochs(entries, batch_trajectories=4, count=2, seed=3)


def read(entries, start=0, rows=slice(None), workers=0):
    return list(reader(batches(entries), feed(rows), start, workers=workers))


def members(prepared):
    """Which trajectories a batch holds: thousands of the first ids of its pieces."""
    starts = [p.tokens_BT[(p.positions_BT == 0) & (p.segments_BT > 0)] for p in prepared.packed]
    return sorted(int(x) // 1000 for x in np.concatenate(starts))


def test_every_epoch_has_every_trajectory_once_in_another_order(entries):
    held = [members(batch) for batch in read(entries)]
    assert [len(batch) for batch in held] == [4, 4, 2, 4, 4, 2]
    first, second = held[0] + held[1] + held[2], held[3] + held[4] + held[5]
    assert sorted(first) == sorted(second) == list(range(1, 11))
    assert held[0] != held[3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restart_in_the_middle_of_an_epoch_meets_the_same_batches(entries, workers):
    whole = read(entries)
    rest = read(entries, 2, workers=workers)
    assert len(rest) == 4
    for got, want in zip(rest, whole[2:], strict=True):
        assert got.facts == want.facts
        for a, b in zip(got.packed, want.packed, strict=True):
            np.testing.assert_array_equal(a.tokens_BT, b.tokens_BT)
            np.testing.assert_array_equal(a.ids_LBTC, b.ids_LBTC)


def test_processes_read_rows_that_make_up_the_whole_and_never_overlap(entries):
    whole = read(entries)
    parts = [read(entries, rows=slice(i, i + 1)) for i in range(2)]
    for number, batch in enumerate(whole):
        for micro, want in enumerate(batch.packed):
            rows = [part[number].packed[micro].tokens_BT for part in parts]
            np.testing.assert_array_equal(np.concatenate(rows), want.tokens_BT)


def test_kept_trajectories_are_solved_and_at_most_so_many_of_a_task(tmp_path):
    for number in range(5):
        part = tmp_path / f"part{number}"
        made.folder(part, [5], outcome="solved" if number < 4 else "partial", reward=1.0)
    made.folder(tmp_path / "dead", [5], outcome="infra_error", reward=None)
    kept, counts = list_entries(str(tmp_path), keep="solved", per_task=3, seed=0)
    assert len(kept) == 3
    assert counts == {"found": 6, "ungraded": 1, "unsolved": 1, "over_per_task": 1, "kept": 3}
    again, _ = list_entries(str(tmp_path), keep="solved", per_task=3, seed=0)
    assert again == kept


def test_a_folder_with_nothing_to_train_on_says_what_it_held(tmp_path):
    with pytest.raises(UserError, match="is no directory"):
        list_entries(str(tmp_path / "no"), keep="all", per_task=0, seed=0)
    made.folder(tmp_path, [5, 6])
    with pytest.raises(UserError, match=r"2 found, 0 ungraded, 2 unsolved"):
        list_entries(str(tmp_path), keep="solved", per_task=0, seed=0)


def test_a_pass_over_the_tasks_has_each_once_and_attempts_together():
    schedule = Schedule([f"task{i}" for i in range(6)], launch=4, group=2, seed=1)
    steps = [schedule.of(step) for step in range(6)]
    assert all(step[0] == step[1] and step[2] == step[3] for step in steps)
    one_pass = [task for step in steps[:3] for task in step[::2]]
    next_pass = [task for step in steps[3:] for task in step[::2]]
    assert sorted(one_pass) == sorted(next_pass) == [f"task{i}" for i in range(6)]
    assert one_pass != next_pass
    assert Schedule([f"task{i}" for i in range(6)], launch=4, group=2, seed=1).of(4) == steps[4]
    with pytest.raises(UserError, match=r"launch=3 is no multiple of ppo\.group=2"):
        Schedule(["a"], launch=3, group=2, seed=0)


def test_tasks_come_from_a_split_or_a_list(tmp_path):
    folder = tmp_path / "tasks"
    make(folder, seed=0, count=10)
    split = task_folders(str(folder), "train")
    assert len(split) == 8 and all((path / "task.toml").is_file() for path in split)
    chosen = tmp_path / "chosen.jsonl"
    chosen.write_text("".join(json.dumps({"path": str(path)}) + "\n" for path in split[:2]))
    assert task_folders(str(folder), str(chosen)) == split[:2]
    chosen.write_text('{"path": "gone"}\n')
    with pytest.raises(UserError, match=r"chosen\.jsonl:1: gone is no directory"):
        task_folders(str(folder), str(chosen))
    chosen.write_text("")
    with pytest.raises(UserError, match="holds no task"):
        task_folders(str(folder), str(chosen))
    with pytest.raises(UserError, match=r"neither .*trian.* exists"):
        task_folders(str(folder), "trian")

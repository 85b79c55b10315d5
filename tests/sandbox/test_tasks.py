"""The generator of shipped tasks: reproducible, graded, and in splits that share no parameter."""

import ast
import hashlib
import itertools
import warnings

import pytest

from sandbox import task as tasks
from sandbox.tasks.compose import STEPS_OF_LEVEL
from sandbox.tasks.draw import FIRST, SECOND, Split, names_of, split_of_name
from sandbox.tasks.families import FAMILIES
from sandbox.tasks.make import make, split_counts
from t1jax.errors import UserError

ROUND = len(FAMILIES) * len(STEPS_OF_LEVEL)  # every family at every level


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tasks of one seed: all kinds for training, and as many as fit for the other splits."""
    out = tmp_path_factory.mktemp("tasks") / "made"
    make(out, seed=3, count=2 * ROUND)
    return out


@pytest.fixture(scope="module")
def loaded(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {split: [tasks.load(path) for path in tasks.find(made / split)] for split in Split}


def digest(root):
    """Of every file's path, mode and content."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        found.update(f"{path.relative_to(root)} {path.stat().st_mode:o} ".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def functions(task):
    """Names of the tests, and how many asserts each has."""
    tree = ast.parse((task.tests / "test_outputs.py").read_text())
    return {
        node.name: sum(isinstance(part, ast.Assert) for part in node.body)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_one_seed_gives_the_same_bytes_and_another_other_tasks(made, tmp_path):
    make(tmp_path / "again", seed=3, count=2 * ROUND)
    make(tmp_path / "other", seed=4, count=20)
    assert digest(tmp_path / "again") == digest(made)
    first = "train/files-1-000000/instruction.md"
    assert (tmp_path / "other" / first).read_text() != (made / first).read_text()


def test_all_families_come_in_all_levels(loaded):
    assert len(FAMILIES) >= 12
    kinds = {
        (task.config.metadata["category"], int(task.config.metadata["difficulty"]))
        for task in loaded[Split.train]
    }
    assert kinds == set(itertools.product(FAMILIES, STEPS_OF_LEVEL))


@pytest.mark.parametrize("parameter", ["names", "numbers"])
def test_splits_share_no_parameter(loaded, tmp_path, parameter):
    """Not even splits that were made with another seed."""
    make(tmp_path / "other", seed=9, count=ROUND)
    others = {s: [tasks.load(p) for p in tasks.find(tmp_path / "other" / s)] for s in Split}
    used = {
        split: {
            value
            for task in [*loaded[split], *others[split]]
            for value in task.config.metadata[parameter]
        }
        for split in Split
    }
    for first, second in itertools.combinations(Split, 2):
        assert used[first] and used[first].isdisjoint(used[second])


def test_every_word_occurs_in_every_split_and_a_names_split_never_changes():
    for split in Split:
        words = {word for name in names_of(split) for word in name.split("_")}
        assert words == {*FIRST, *SECOND}
    assert [split_of_name(name) for name in ("red_fox", "red_seed", "tiny_rain")] == [
        Split.train,
        Split.validation,
        Split.test,
    ]


def test_no_two_tasks_ask_the_same(loaded):
    instructions = [task.instruction for split in Split for task in loaded[split]]
    assert len(set(instructions)) == len(instructions)


def test_small_tasks_take_up_to_5_commands_and_the_hard_end_20_or_more(loaded):
    commands: dict[int, list[int]] = {level: [] for level in STEPS_OF_LEVEL}
    for split in Split:
        for task in loaded[split]:
            metadata = task.config.metadata
            solve = (task.solution / "solve.sh").read_text().splitlines()
            assert metadata["commands"] == len(solve) - 2  # the first line, and cd
            commands[int(metadata["difficulty"])].append(metadata["commands"])
    assert max(commands[1]) <= 5
    assert min(commands[max(commands)]) >= 20


def test_a_verifier_has_2_to_12_assertions_of_different_names(loaded):
    for split in Split:
        for task in loaded[split]:
            found = functions(task)
            assert 2 <= len(found) <= 12, task.root
            assert all(found.values()), task.root
            names = (task.tests / "test_outputs.py").read_text().count("def test_")
            assert names == len(found), task.root


def test_training_words_are_few(loaded):
    """A model trained from scratch on these tasks has to learn a small vocabulary."""
    small = [t for t in loaded[Split.train] if t.config.metadata["difficulty"] == "1"]
    words = {w for t in small for w in t.instruction.replace("_", " ").replace(".", " ").split()}
    assert max(len(task.instruction) for task in small) < 200
    assert len({word for word in words if word.isalpha()}) < 320


@pytest.mark.parametrize(
    ("count", "counts"),
    [(2000, (1600, 200, 200)), (10, (8, 1, 1)), (9, (9, 0, 0)), (1, (1, 0, 0))],
)
def test_split_counts_add_up(count, counts):
    assert tuple(split_counts(count).values()) == counts


def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"level \[7\] is unknown; there are \[1, 2, 3, 4, 5\]"):
        make(tmp_path / "out", count=5, levels=(1, 7))
    with pytest.raises(UserError, match=r"family \['gti'\] is unknown; there are"):
        make(tmp_path / "out", count=5, families=("gti",))
    with pytest.raises(UserError, match="count is 0; expected at least 1"):
        make(tmp_path / "out", count=0)
    with pytest.raises(UserError, match="exists; remove it or choose another"):
        make(tmp_path, count=1)
    assert list(tmp_path.iterdir()) == []


def test_nothing_half_written_looks_complete(tmp_path):
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", count=20, advance=stop)
    assert not (tmp_path / "out").exists()
    make(tmp_path / "out", count=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

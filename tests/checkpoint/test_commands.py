"""convert, export and init-tiny as commands: what they end with, and which options they refuse."""

import sys

import pytest

from t1jax import cli, errors
from t1jax.checkpoint.init_tiny import SIZES


def run(monkeypatch, *arguments):
    """The exit status of `t1jax ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["t1jax", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_each_ends_with_the_path_that_it_wrote(monkeypatch, capsys, tmp_path):
    made_here = [("init-tiny", "hf"), ("convert", "hf", "ck"), ("export", "ck", "back")]
    for command, *names in made_here:
        paths = [tmp_path / name for name in names]
        assert run(monkeypatch, command, *paths) == errors.OK
        assert capsys.readouterr().out.splitlines()[-1] == f"wrote {paths[-1]}"
        assert paths[-1].is_dir()


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (("init-tiny", "dst", "--size", "huge"), "--size", "huge"),
        (("init-tiny", "dst", "--seed", "-1"), "--seed", "-1"),
        (("init-tiny", "dst", "--seed", "x"), "--seed", "x"),
        (("export", "src", "dst", "--max-shard-size", "5PB"), "--max-shard-size", "5PB"),
        (("export", "src", "dst", "--max-shard-size", "0"), "--max-shard-size", "0"),
        (("export", "src", "dst", "--max-shard-size", "-5GB"), "--max-shard-size", "-5GB"),
        (("export", "src", "dst", "--max-shard-size", "9" * 400), "--max-shard-size", "999"),
        (("convert", "src", "dst", "--dtype", "int8"), "--dtype", "int8"),
    ],
)
def test_a_bad_value_is_bad_usage_that_names_it(monkeypatch, capsys, arguments, option, value):
    assert run(monkeypatch, *arguments) == errors.BAD_USAGE
    shown = capsys.readouterr().err
    assert option in shown
    assert value in shown


def test_a_refusal_is_one_line_and_writes_no_path(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "convert", tmp_path / "none", tmp_path / "dst") == errors.FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"error: {tmp_path / 'none'} does not exist")


def test_the_command_knows_every_size():
    assert set(cli.Size) == set(SIZES)


@pytest.mark.parametrize(
    ("text", "count_bytes"), [("4GiB", 4 * 2**30), ("1.5 mib", 1_572_864), ("2KiB", 2048)]
)
def test_binary_units(text, count_bytes):
    assert cli.size_in_bytes(text) == count_bytes

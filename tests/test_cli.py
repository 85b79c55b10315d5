"""The command line ends with the right status and one clear last line."""

import sys
import types

import pytest

from t1jax import cli, errors


def run(monkeypatch, *arguments):
    """The exit status of `t1jax ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["t1jax", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def failing(monkeypatch, error):
    """Makes `t1jax report` raise the error."""

    def report(run):
        raise error

    fake = types.SimpleNamespace(report=report)
    monkeypatch.setitem(sys.modules, "t1jax.evaluation.report", fake)


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "version") == 0
    assert capsys.readouterr().out == f"{cli.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("convert", "only-one"),
        ("score", "c", "i", "o", "--dtype", "int8"),
        ("export", "a", "b", "--max-shard-size", "5XB"),
        ("score", "c", "i", "o", "--batch-tokens", "0"),
    ],
)
def test_bad_usage_is_status_2(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == errors.BAD_USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "last_line", "with_traceback"),
    [
        (errors.UserError("no config.json in x;\nname a checkpoint"), 1,
         "error: no config.json in x; name a checkpoint", False),
        (ValueError("mesh 'a=': say a=2"), 1, "error: mesh 'a=': say a=2", False),
        (FileNotFoundError(2, "No such file", "x"), 1, "error: [Errno 2] No such file: 'x'", False),
        (errors.Preempted("saved step 7"), 75, "error: saved step 7", False),
        (KeyError("layer"), 1, "error: KeyError: 'layer'", True),
    ],
)  # fmt: skip
def test_an_error_is_one_last_line(
    monkeypatch, capsys, error, status, last_line, with_traceback
):
    failing(monkeypatch, error)
    assert run(monkeypatch, "report", "run") == status
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == last_line
    assert ("Traceback" in shown) == with_traceback


def test_traceback_shows_where(monkeypatch, capsys):
    failing(monkeypatch, errors.UserError("no such place"))
    assert run(monkeypatch, "--traceback", "report", "run") == errors.FAILED
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("Traceback")
    assert shown[-1] == "error: no such place"


@pytest.mark.parametrize(
    ("text", "count_bytes"),
    [("5GB", 5_000_000_000), ("1.5 mb", 1_500_000), ("4096", 4096), ("7B", 7)],
)
def test_sizes(text, count_bytes):
    assert cli.size_in_bytes(text) == count_bytes

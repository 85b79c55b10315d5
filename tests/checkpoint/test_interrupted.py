"""A conversion that is killed leaves nothing that looks complete, and can be run again."""

import os
import signal
import subprocess
import sys

import pytest

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.restore import open_checkpoint
from t1jax.errors import UserError

from . import made

# Kills itself at the nth call of a function: no cleanup runs, as when a machine goes away.
PROGRAM = """
import os, signal, sys
from t1jax.checkpoint import chunked, convert, export

module, name, count, command, src, dst = sys.argv[1:]
module = {"chunked": chunked, "convert": convert, "export": export}[module]
real, calls = getattr(module, name), []

def deadly(*args, **kwargs):
    calls.append(args)
    if len(calls) == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

setattr(module, name, deadly)
{"convert": convert.convert, "export": export.export}[command](src, dst)
"""


def killed(command, src, dst, module, name, count):
    """Runs a command that dies at the `count`th call of module.name."""
    arguments = [module, name, str(count), command, str(src), str(dst)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": str(made.FIXTURES.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        ("chunked", "fill", 40),
        pytest.param("chunked", "fill", 1, marks=pytest.mark.slow),
        pytest.param("convert", "make_manifest", 1, marks=pytest.mark.slow),
    ],
    ids=["half the chunks", "no chunk", "no manifest"],
)
def test_a_killed_conversion_looks_incomplete_and_a_rerun_completes_it(
    tmp_path, module, name, count
):
    dst = tmp_path / "dst"
    killed("convert", made.FIXTURES / "ref-b", dst, module, name, count)
    assert made.left_behind(tmp_path) == ["dst.incomplete"]
    with pytest.raises(UserError, match=r"dst does not exist; .*dst\.incomplete"):
        open_checkpoint(dst)
    with pytest.raises(UserError, match="is incomplete"):
        open_checkpoint(tmp_path / "dst.incomplete")
    convert(made.FIXTURES / "ref-b", dst, verify=True, progress=made.silent())
    assert made.left_behind(tmp_path) == ["dst"]
    open_checkpoint(dst)


@pytest.mark.slow
def test_a_killed_export_appears_nowhere_and_a_rerun_completes_it(tmp_path):
    convert(made.FIXTURES / "ref-b", tmp_path / "src", progress=made.silent())
    killed("export", tmp_path / "src", tmp_path / "back", "export", "assemble", 100)
    assert made.left_behind(tmp_path) == ["back.incomplete"]
    export(tmp_path / "src", tmp_path / "back", progress=made.silent())
    made.assert_same_tensors(made.FIXTURES / "ref-b", tmp_path / "back")
    assert made.left_behind(tmp_path) == ["back"]


def test_an_error_midway_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, starts, read, memory):
        raise OSError("the disk is gone")

    monkeypatch.setattr("t1jax.checkpoint.chunked.Parameter.block", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        convert(made.FIXTURES / "ref-b", tmp_path / "dst", progress=made.silent())
    assert made.left_behind(tmp_path) == []


def test_where_renames_are_not_atomic_a_mark_says_incomplete(tmp_path, monkeypatch):
    """As on an object store: the work happens in place."""
    monkeypatch.setattr("t1jax.checkpoint.staging.is_local", lambda path: False)
    dst, seen = tmp_path / "dst", []

    def fail_once(*args):
        with pytest.raises(UserError, match="is incomplete"):
            open_checkpoint(dst)
        seen.extend(path.name for path in dst.iterdir())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("t1jax.checkpoint.convert.make_manifest", fail_once)
        with pytest.raises(KeyboardInterrupt):
            convert(made.FIXTURES / "ref-b", dst, progress=made.silent())
    assert "INCOMPLETE" in seen
    assert made.left_behind(tmp_path) == []
    dst.mkdir()
    (dst / "INCOMPLETE").touch()
    (dst / "leftover").touch()
    convert(made.FIXTURES / "ref-b", dst, progress=made.silent())
    assert not (dst / "leftover").exists()
    assert not (dst / "INCOMPLETE").exists()
    open_checkpoint(dst)

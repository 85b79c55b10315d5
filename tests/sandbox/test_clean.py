"""`t1jax sandbox clean` where there is no engine."""

import asyncio
import os
import subprocess
import sys

import pytest

from sandbox import engine, janitor
from sandbox.base import InfraError


def test_without_an_engine_control_groups_are_cleaned_and_it_says_so(tmp_path, monkeypatch):
    class Left:
        removed = False

        def remove(self):
            self.removed = True

    left = Left()
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(engine, "LOCAL_ENGINE", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(janitor.cgroups, "leftovers", lambda: [left])
    cleaned = asyncio.run(janitor.clean())
    assert (cleaned.containers, cleaned.groups, left.removed) == (0, 1, True)
    assert "none.sock" in cleaned.no_engine


def test_an_engine_that_was_named_has_to_answer(tmp_path):
    with pytest.raises(InfraError, match=r"none.sock"):
        asyncio.run(janitor.clean(endpoints=f"unix://{tmp_path}/none.sock"))


def test_the_command_ends_with_0_and_one_line_on_the_engine(tmp_path):
    code = f"from sandbox import engine; engine.LOCAL_ENGINE = 'unix://{tmp_path}/none.sock'; "
    code += "from t1jax.cli import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    command = [sys.executable, "-c", code, "sandbox", "clean"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("there is no engine, so no container was looked")

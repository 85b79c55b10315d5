"""google-jetstream's own Driver runs our engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_driver_of_the_release_samples_what_a_direct_loop_does():
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, "-m", "tests.sampling.driver"], capture_output=True, text=True,
        timeout=240, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-3000:]
    sampled = json.loads(shown.stdout.splitlines()[-1])
    assert [len(tokens) for tokens in sampled["want"]] == [6] * 10
    assert sampled["got"] == sampled["want"]

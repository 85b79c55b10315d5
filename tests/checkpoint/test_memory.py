"""Converting takes memory for a file and a stacked parameter, not for the model."""

import json
import os
import subprocess
import sys

import pytest

from . import made

BENCHMARK = made.FIXTURES.parent / "benchmarks" / "conversion.py"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_peak_memory_is_the_largest_file_and_stacked_parameter_and_half_a_gigabyte(layout):
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--size=small", "--pairs=1", f"--layout={layout}"],
        env=os.environ | {"PYTHONPATH": str(BENCHMARK.parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["bound_bytes"] < figures["bytes"]["total"]  # holding all of it would show
    assert figures["peak_bytes"] <= figures["bound_bytes"]

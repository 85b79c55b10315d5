"""Every test runs on eight CPU devices with strict promotion, set before jax is imported.

The settings are environment variables, so that commands which a test starts have them too.
"""

import os
from pathlib import Path

import pytest

DEVICES = "--xla_force_host_platform_device_count=8"
# Compiling is most of a test's time, and unoptimised programs compile twice as fast.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES} {QUICK}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# `make test` names a cache of compiled programs (JAX_COMPILATION_CACHE_DIR) for all processes.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixture_dir():
    """`fixture_dir("ref-a")` is the folder of that fixture; see fixtures/README.md."""

    def find(name: str) -> Path:
        folder = FIXTURES / name
        if not folder.is_dir():
            known = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
            raise ValueError(f"no fixture {name!r} in {FIXTURES}; there are {known}")
        return folder

    return find

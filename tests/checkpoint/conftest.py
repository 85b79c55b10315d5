"""`hf` marks tests that need torch and transformers: CI has them, the newest-jax run has not."""

import importlib.util


def pytest_configure(config):
    config.addinivalue_line("markers", "hf: needs torch and transformers; left out without them")


def pytest_collection_modifyitems(config, items):
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return
    left_out = [item for item in items if item.get_closest_marker("hf")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

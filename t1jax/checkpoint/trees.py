"""Parameter trees (nested dicts) by path."""

from typing import Any

from t1jax.model.qwen3_5 import Params

Path = tuple[str, ...]


def flatten(tree: Params, above: Path = ()) -> dict[Path, Any]:
    """Leaves of nested dicts by path."""
    leaves: dict[Path, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= flatten(value, (*above, name))
        else:
            leaves[*above, name] = value
    return leaves


def put(tree: Params, path: Path, leaf: Any) -> None:
    """Sets one leaf of nested dicts, making the dicts above it."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf

"""A config's file as a tree of plain values: what lies below it, and `{run}` in its texts.

    base: ../tiny.yaml        # the path of another config, from this file's folder
    ppo: {replay: false}      # what differs; null takes a section away

Knows nothing of what the keys mean.
"""

from pathlib import Path
from typing import Any

import yaml

from t1jax.errors import UserError


def read_tree(file: Path, overlays: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's tree; where it names a `base:`, laid over the tree of that one.

    Args:
      file: YAML.
      overlays: the files that lie above it already.

    Raises:
      UserError: a file cannot be read, is no mapping, or is its own base.
    """
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file} holds no mapping; expected sections such as `model:`")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{file}: base={base!r}; expected a config's path, from this file's folder")
    below = (file.parent / base).resolve()
    overlays = (*overlays, file.resolve())
    if below in overlays:
        raise UserError(f"{file}: base={base!r} leads back to {below}; a base stands on its own")
    return _over(read_tree(below, overlays), tree)


def _over(below: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged; any other value, null too, replaces what is below."""
    merged = dict(below)
    for name, value in tree.items():
        under = merged.get(name)
        both = isinstance(value, dict) and isinstance(under, dict)
        merged[name] = _over(under, value) if both else value  # type: ignore[arg-type]
    return merged


def in_run(tree: Any, run: str) -> Any:
    """The tree with `{run}` replaced in every text."""
    if isinstance(tree, dict):
        return {name: in_run(value, run) for name, value in tree.items()}
    return tree.replace("{run}", run) if isinstance(tree, str) else tree

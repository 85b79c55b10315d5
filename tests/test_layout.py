"""Which file may import what: the three worlds and the arrows between the parts.

Host files (H) never reach jax. Device files (D) touch no files, processes or text formats. Seam
files (S) may do both. PLACES holds every part, those still to come included, and its arrows.
Read from the source, so imports inside functions count too.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Place(NamedTuple):
    world: str
    may_import: tuple[str, ...]  # places; the place itself and EVERYWHERE besides


EVERYWHERE = ("t1jax", "t1jax.config", "t1jax.errors")  # `t1jax` itself is only the version

BELOW_PIPELINE = (
    "sandbox",
    "t1jax.trajectory",
    "t1jax.agent",
    "t1jax.data",
    "t1jax.model",
    "t1jax.rl",
    "t1jax.sampling",
    "t1jax.sampling.open",
    "t1jax.checkpoint",
    "t1jax.progress",
    "t1jax.interrupts",
)

RUN = (  # the whole run puts stages and evaluation in order
    "t1jax.pipeline",
    *(f"t1jax.pipeline.{name}" for name in ("run_stages", "run_plan", "run_checks", "selection")),
    "t1jax.evaluation",
    *BELOW_PIPELINE,
)

SAMPLING_DEVICE = tuple(
    f"t1jax.sampling.{name}" for name in ("sampler", "programs", "results", "engine")
)

PLACES = {
    "t1jax": Place("H", ()),
    "t1jax.errors": Place("H", ()),
    "t1jax.interrupts": Place("H", ()),
    "t1jax.config": Place("H", ("t1jax.overlays",)),
    "t1jax.overlays": Place("H", ()),
    "t1jax.progress": Place("H", ()),
    "t1jax.trajectory": Place("H", ()),
    "sandbox": Place("H", ()),
    "t1jax.agent": Place("H", ("t1jax.trajectory", "sandbox")),
    "t1jax.data": Place("H", ("t1jax.trajectory", "t1jax.progress")),
    "t1jax.model": Place("D", ()),
    "t1jax.rl": Place("D", ("t1jax.model",)),
    "t1jax.sampling": Place(
        "S", ("t1jax.model", "t1jax.trajectory", "t1jax.progress", *SAMPLING_DEVICE)
    ),
    "t1jax.sampling.open": Place("S", BELOW_PIPELINE + SAMPLING_DEVICE),
    "t1jax.sampling.sample": Place("S", ("t1jax.sampling.open", *BELOW_PIPELINE)),
    "t1jax.sampling.sampler": Place("D", ("t1jax.model",)),
    "t1jax.sampling.programs": Place("D", ("t1jax.model", "t1jax.sampling.sampler")),
    "t1jax.sampling.results": Place("D", ("t1jax.sampling.programs",)),
    "t1jax.sampling.engine": Place("D", ("t1jax.model", *SAMPLING_DEVICE)),
    "t1jax.checkpoint": Place("S", ("t1jax.model", "t1jax.progress", "sandbox")),
    "t1jax.score": Place(
        "S", ("t1jax.model", "t1jax.trajectory", "t1jax.checkpoint", "t1jax.progress")
    ),
    "t1jax.pipeline": Place("S", BELOW_PIPELINE),
    "t1jax.pipeline.run": Place("S", RUN),
    "t1jax.pipeline.run_stages": Place("S", RUN),
    "t1jax.pipeline.run_plan": Place("S", RUN),
    "t1jax.pipeline.run_checks": Place("S", RUN),
    "t1jax.pipeline.selection": Place("S", RUN),
    "t1jax.evaluation": Place("S", ("t1jax.pipeline", *BELOW_PIPELINE)),
    "t1jax.plan": Place("S", ("t1jax.model", "t1jax.rl", "t1jax.progress")),
}
COMMANDS = "t1jax.cli"  # may import every place

JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "tokamax"}
OUTSIDE = {  # what a device file has no business with: files, processes, text, waiting
    *("asyncio", "csv", "gzip", "io", "json", "os", "pathlib", "pickle", "shutil", "socket"),
    *("subprocess", "tempfile", "threading", "time", "zipfile"),
    *("etils", "orbax", "rich", "safetensors", "tokenizers", "transformers", "typer", "yaml"),
}


def place_of(module: str) -> str:
    """The longest name in PLACES that the module lies in; COMMANDS for the command line."""
    if module == COMMANDS:
        return COMMANDS
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in PLACES and (name != "t1jax" or module == "t1jax"):
            return name
    raise ValueError(f"{module} lies in no part of PLACES: add it there with its world and arrows")


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("t1jax", "sandbox")


def imports(module: str, source: str, is_package: bool, known: frozenset[str]) -> set[str]:
    """Absolute names of all modules that the source imports."""
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            children = {f"{base}.{alias.name}" for alias in node.names} & known
            found |= children or {base}
    return found


def read_project(root: Path) -> dict[str, set[str]]:
    """What every module of t1jax and sandbox imports."""
    files = [path for top in ("t1jax", "sandbox") for path in sorted((root / top).rglob("*.py"))]
    paths = {}
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = frozenset(paths)
    return {
        module: imports(module, path.read_text(), path.name == "__init__.py", known)
        for module, path in paths.items()
    }


def broken_arrows(project: dict[str, set[str]]) -> list[str]:
    broken = []
    for module, imported in project.items():
        place = place_of(module)
        if place == COMMANDS:
            continue
        allowed = {place, *PLACES[place].may_import, *EVERYWHERE}
        for name in sorted(filter(is_ours, imported)):
            if place_of(name) not in allowed:
                broken.append(f"{module} imports {name}; {place} may import {sorted(allowed)}")
    return broken


def paths_to_jax(project: dict[str, set[str]]) -> list[str]:
    """For each host module that reaches jax, through which modules."""
    reached = []
    for module in project:
        if place_of(module) == COMMANDS or PLACES[place_of(module)].world != "H":
            continue
        waiting, seen = [(module,)], set()
        while waiting:
            path = waiting.pop()
            for name in sorted(project.get(path[-1], ())):
                if name.split(".")[0] in JAX:
                    reached.append(" -> ".join((*path, name)))
                elif name not in seen:
                    seen.add(name)
                    waiting.append((*path, name))
    return reached


def outside_in_device_files(project: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {name}; device files are pure functions of arrays"
        for module, imported in project.items()
        if place_of(module) != COMMANDS and PLACES[place_of(module)].world == "D"
        for name in sorted(imported)
        if name.split(".")[0] in OUTSIDE
    ]


@pytest.fixture(scope="module")
def project() -> dict[str, set[str]]:
    return read_project(ROOT)


def test_every_import_follows_an_arrow(project):
    assert broken_arrows(project) == []


def test_host_files_never_reach_jax(project):
    assert paths_to_jax(project) == []


def test_device_files_import_nothing_of_the_outside(project):
    assert outside_in_device_files(project) == []


def test_device_files_open_no_file():
    opened = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for place in ("model", "rl")
        for path in sorted((ROOT / "t1jax" / place).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    assert opened == []


@pytest.mark.parametrize(
    ("module", "source", "check"),
    [
        ("t1jax.model.moe", "from t1jax.checkpoint import convert", broken_arrows),
        ("t1jax.model.moe", "def f():\n    from .. import checkpoint", broken_arrows),
        ("sandbox.local", "import t1jax.trajectory.record", broken_arrows),
        ("t1jax.trajectory.record", "import jax.numpy as jnp", paths_to_jax),
        ("t1jax.agent", "from t1jax.model import moe", paths_to_jax),
        ("t1jax.model.moe", "from pathlib import Path", outside_in_device_files),
        ("t1jax.sampling.engine", "import asyncio", outside_in_device_files),
    ],
)
def test_a_forbidden_import_is_reported(module, source, check):
    known = frozenset({"t1jax.checkpoint", "t1jax.model.moe"})
    imported = imports(module, source, False, known)
    others = {"t1jax.checkpoint": set(), "t1jax.model.moe": {"jax"}}
    assert len(check(others | {module: imported})) == 1


def test_a_part_that_the_table_lacks_is_refused():
    with pytest.raises(ValueError, match=r"t1jax\.helpers lies in no part of PLACES"):
        place_of("t1jax.helpers")


def test_the_command_line_imports_without_jax():
    heavy = ["jax", "flax", "orbax", "torch", "transformers", "numpy"]
    program = f"import sys, t1jax.cli; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "[]"

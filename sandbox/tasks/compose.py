"""Steps into a task, and a task into a directory in Harbor's format that runs on every back end."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

from sandbox.base import BASE_IMAGE, VERIFIER_PYTHON
from sandbox.tasks.draw import Draw, Split
from sandbox.tasks.step import Step

STEPS_OF_LEVEL = {1: 1, 2: 2, 3: 4, 4: 8, 5: 24}
MOST_TESTS = 12
SECONDS_A_RUN = 2
MEMORY_MB, STORAGE_MB = 512, 64
CHECKS = Path(__file__).with_name("checks.py")
IDENTITY = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "dev"), ("EMAIL", "dev@example.org"))
}

# Nothing that an agent may leave is read: no plugin but the report's, no configuration. Tracebacks
# are Python's own: pytest's cost a failing run 0.15 s of 0.40 s, most of it for colours.
TEST_SH = f"""#!/bin/bash
cd /
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if {VERIFIER_PYTHON} -I -B -m pytest -c /dev/null --rootdir=/tests -p no:cacheprovider \\
    --tb=native -p ctrf.main --ctrf /logs/verifier/ctrf.json -q /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A task that is not written yet."""

    name: str
    family: str
    level: int
    split: Split
    seed: int
    steps: tuple[Step, ...]
    draw: Draw

    @property
    def instruction(self) -> str:
        """The sentence of a single step, or a numbered list."""
        if len(self.steps) == 1:
            return self.steps[0].say + "\n"
        return "".join(f"{index}. {step.say}\n" for index, step in enumerate(self.steps, 1))

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(command for step in self.steps for command in step.solve)


def write(draft: Draft, root: Path) -> None:
    """Writes the task's directory, whose bytes depend on the draft alone."""
    files = {
        "task.toml": _toml(draft),
        "instruction.md": draft.instruction,
        "environment/Dockerfile": _dockerfile(draft),
        "solution/solve.sh": "".join(f"{c}\n" for c in ("#!/bin/bash", "cd /app", *draft.commands)),
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": _tests(draft),
    }
    setup = _setup(draft)
    if setup:
        files["environment/setup.sh"] = setup
    for name, text in files.items():
        _write(root / name, text, 0o755 if name.endswith(".sh") else 0o644)
    shutil.copyfile(CHECKS, root / "tests/checks.py")
    given = root / "environment/files"
    given.mkdir()
    for step in draft.steps:
        for name, content in step.files.items():
            _write(given / name, content, step.modes.get(name, 0o644))


def _write(path: Path, content: str | bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)


def _toml(draft: Draft) -> str:
    setup = 'setup = "setup.sh"\n' if _setup(draft) else ""
    identity = "".join(f'{name} = "{value}"\n' for name, value in IDENTITY.items())
    return f"""schema_version = "1.4"

[task]
name = "t1jax/{draft.name}"

[metadata]
category = "{draft.family}"
difficulty = "{draft.level}"
split = "{draft.split}"
seed = {draft.seed}
commands = {len(draft.commands)}
names = {json.dumps(draft.draw.names)}
numbers = {draft.draw.numbers}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 120.0
environment_mode = "separate"
{_collect(draft)}
[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = {MEMORY_MB}
storage_mb = {STORAGE_MB}
network_mode = "no-network"
workdir = "/app"

[environment.env]
{identity}
[environment.local]
files = "files"
{setup}"""


def _collect(draft: Draft) -> str:
    """One command that runs every hidden check, each with a time limit of its own."""
    runs = {name: run for step in draft.steps for name, run in step.collect.items()}
    if not runs:
        return ""
    lines = ["rm -rf .checks", "mkdir .checks"]
    for name, run in runs.items():
        quoted = "'" + run.replace("'", "'\\''") + "'"
        lines.append(f"timeout -k 1 {SECONDS_A_RUN} bash -c {quoted} > .checks/{name} 2>&1")
    command = json.dumps("\n".join(lines))
    timeout_sec = float(10 + (SECONDS_A_RUN + 1) * len(runs))
    return f"\n[[verifier.collect]]\ncommand = {command}\ntimeout_sec = {timeout_sec}\n"


def _dockerfile(draft: Draft) -> str:
    lines = [f"FROM {BASE_IMAGE}", "COPY files/ /app/", "WORKDIR /app"]
    if _setup(draft):
        lines += ["COPY setup.sh /setup.sh", "RUN bash /setup.sh && rm /setup.sh"]
    return "".join(f"{line}\n" for line in lines)


def _setup(draft: Draft) -> str:
    """What files alone cannot say, such as the history of a repository."""
    parts = [step.setup for step in draft.steps if step.setup]
    if not parts:
        return ""
    identity = [f"export {name}={value}" for name, value in IDENTITY.items()]
    dates = [f"export GIT_{role}_DATE='2026-01-01T00:00:00Z'" for role in ("AUTHOR", "COMMITTER")]
    return "\n".join(["set -e", "cd /app", *identity, *dates, *parts])


def _tests(draft: Draft) -> str:
    """Independent tests, one a promise; at the hard end one for several, so that 12 are enough."""
    promises = [
        (f"{index}_{name}", expression)
        for index, step in enumerate(draft.steps, 1)
        for name, expression in step.checks
    ]
    count = min(MOST_TESTS, len(promises))
    bounds = [len(promises) * turn // count for turn in range(count + 1)]
    parts = ['"""What must be true when the task is done."""\n\nfrom checks import *\n']
    for start, end in itertools.pairwise(bounds):
        name = re.sub(r"\W+", "_", promises[start][0])
        asserts = "".join(f"    assert {expression}\n" for _, expression in promises[start:end])
        parts.append(f"\n\ndef test_{name}():\n{asserts}")
    return "".join(parts)

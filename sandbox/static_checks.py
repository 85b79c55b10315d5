"""What is wrong with a task that reading it shows: leaks, hidden requirements, loose downloads.

Heuristics on text, so most findings ask for a person's look (`review`); a leak or a copy of
another task is certain enough to reject.
"""

import dataclasses
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from sandbox.task import Task

SHINGLE_WORDS = 3
NEAR_IDENTICAL = 0.95
LEAST_LEAKED_CHARACTERS = 40
FILE_REFERENCE = re.compile(
    r"""["']((?:/?[\w.+-]+/)*[\w.+-]*\.[A-Za-z]\w{0,7}|/app/[\w./+-]+)["']"""
)
OWN_PLACES = ("/tests/", "/logs/", "/solution/", "/tmp/", "/usr/", "/etc/", "/proc/", "/dev/")
DOWNLOAD = re.compile(
    r"\b(curl|wget|git clone|pip3? install|uv pip install|uvx|uv run|npm (?:i|install)|npx|"
    r"cargo install|go install|apt(?:-get)? (?:-\S+ )*install)\b"
)
LOOPBACK = re.compile(r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)")


class Severity(StrEnum):
    """What a finding does to the audit's verdict."""

    reject = "reject"
    review = "review"


@dataclasses.dataclass(frozen=True)
class Finding:
    severity: Severity
    text: str


def check(task: Task) -> list[Finding]:
    """Everything that one task's files show."""
    tests = texts_of(task.tests)
    solution = texts_of(task.solution)
    environment = texts_of(task.environment)
    return [
        *_leaks(task, tests, solution, environment),
        *_hidden_requirements(task, tests, environment),
        *_network(task, tests, solution),
        *_unpinned(tests, environment),
    ]


def texts_of(folder: Path) -> dict[str, str]:
    """Text files of a folder by relative path; what is no UTF-8 is left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20:
            try:
                found[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def _plain(text: str) -> str:
    return " ".join(text.split())


def _leaks(
    task: Task, tests: dict[str, str], solution: dict[str, str], environment: dict[str, str]
) -> Iterable[Finding]:
    """Test text in the instruction; tests or the solution among what the agent is given."""
    instruction = _plain(task.instruction)
    for name, text in tests.items():
        if not name.endswith((".py", ".sh")):
            continue
        lines = (_plain(line) for line in text.splitlines())
        code = (line for line in lines if line and not line.startswith(("#", "import ", "from ")))
        for line in code:
            if len(line) >= LEAST_LEAKED_CHARACTERS and line in instruction:
                yield Finding(
                    Severity.reject, f"the instruction has a line of tests/{name}: {line}"
                )
                break
    secret = {_plain(text): f"tests/{name}" for name, text in tests.items()}
    secret |= {_plain(text): f"solution/{name}" for name, text in solution.items()}
    for name, text in environment.items():
        plain = _plain(text)
        if len(plain) >= LEAST_LEAKED_CHARACTERS and plain in secret:
            yield Finding(Severity.reject, f"environment/{name} is the same as {secret[plain]}")


def _hidden_requirements(
    task: Task, tests: dict[str, str], environment: dict[str, str]
) -> Iterable[Finding]:
    """Files that a test reads and that neither the instruction nor the environment names."""
    collected = "\n".join(item.command for item in task.config.verifier.collect)
    known = "\n".join([task.instruction, collected, *environment, *environment.values()])
    names = {path.name for path in task.root.rglob("*")}
    for test, text in tests.items():
        if not test.endswith(".py") or test == "checks.py":
            continue
        hidden = {
            reference
            for reference in FILE_REFERENCE.findall(text)
            if not reference.startswith(OWN_PLACES)
            and reference.rsplit("/", 1)[-1] not in names
            and not any(part in known for part in reference.strip("/").split("/"))
        }
        if hidden:
            shown = ", ".join(sorted(hidden)[:5])
            yield Finding(
                Severity.review, f"hidden requirement: tests/{test} reads {shown}, never named"
            )


def _network(task: Task, tests: dict[str, str], solution: dict[str, str]) -> Iterable[Finding]:
    closed = task.config.environment.network_mode == "no-network"
    for place, texts in (("tests", tests), ("solution", solution)):
        for name, text in texts.items():
            used = sorted(_downloads(text))
            if used and closed:
                yield Finding(Severity.reject, f"{place}/{name} uses {used[0]}, without a network")
            elif used:
                yield Finding(Severity.review, f"{place}/{name} uses the network ({used[0]})")


def _downloads(text: str) -> set[str]:
    code = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {m for line in code if not LOOPBACK.search(line) for m in DOWNLOAD.findall(line)}


def _unpinned(tests: dict[str, str], environment: dict[str, str]) -> Iterable[Finding]:
    texts = {f"tests/{name}": text for name, text in tests.items()}
    texts |= {
        f"environment/{name}": text for name, text in environment.items() if "Dockerfile" in name
    }
    for name, text in texts.items():
        for line in text.replace("\\\n", " ").splitlines():
            problem = _unpinned_line(line.strip())
            if problem:
                yield Finding(Severity.review, f"unpinned download: {name}: {problem}")


def _unpinned_line(line: str) -> str:
    """What in a line of shell or Dockerfile names no version; empty where nothing does."""
    image = re.match(r"FROM\s+(?:--\S+\s+)?(\S+)", line)
    if image:
        tag = image[1].rpartition("/")[2]
        loose = image[1] != "scratch" and "@" not in tag and (":" not in tag or "latest" in tag)
        return f"FROM {image[1]}" if loose else ""
    installed = re.search(r"\bpip3? install\s+(.*?)(?:&&|;|\||$)", line)
    if installed:
        packages = [word for word in installed[1].split() if not word.startswith("-")]
        loose_packages = [p for p in packages if not re.search(r"[=<>~@/]|\.txt|\.whl|^\.$", p)]
        return f"pip install {' '.join(loose_packages)}" if loose_packages else ""
    if re.search(
        r"\b(curl|wget)\b.*/latest\b|\braw\.githubusercontent\.com\S*/(main|master)/", line
    ):
        return line[:80]
    if re.search(r"\bgit clone\b", line) and not re.search(r"--branch|-b |checkout|reset", line):
        return line[:80]
    return ""


def content_digest(root: Path) -> str:
    """Of every file of a task, so that an audit knows what it has judged."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or path.is_file():
            content = b"->" if path.is_symlink() else path.read_bytes()
            digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def near_duplicates(instructions: Mapping[str, str]) -> dict[str, str]:
    """For each text that is near-identical to an earlier one, that one's key.

    Exact: pairs whose sets of word triples overlap by 95% (Jaccard). Only texts that share one of
    their rarest triples are compared, which no such pair can avoid (prefix filtering).
    """
    shingles = {key: _shingles(text) for key, text in instructions.items()}
    frequency = Counter(shingle for found in shingles.values() for shingle in found)
    earlier: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    copies = {}
    for key, found in shingles.items():
        rare = sorted(found, key=lambda shingle: (frequency[shingle], shingle))
        prefix = rare[: len(rare) - math.ceil(NEAR_IDENTICAL * len(rare)) + 1]
        candidates = dict.fromkeys(other for shingle in prefix for other in earlier[shingle])
        original = next(
            (o for o in candidates if _jaccard(found, shingles[o]) >= NEAR_IDENTICAL), ""
        )
        if original:
            copies[key] = original
            continue
        for shingle in prefix:
            earlier[shingle].append(key)
    return copies


def _shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    return frozenset(tuple(words[start : start + SHINGLE_WORDS]) for start in range(count))


def _jaccard(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)

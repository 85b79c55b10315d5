"""What a verifier wrote, read as assertions: CTRF, else JUnit, else reward.json, else reward.txt.

Reads a directory that was copied out of the sandbox. Every file in it may be forged, broken or
huge: nothing here raises for its content, a file that cannot be read is named in `problems`.
Knows nothing of outcomes; verify.py judges.
"""

import dataclasses
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

MAX_REPORT_BYTES = 64 * 2**20
CTRF_JSON = "ctrf.json"  # where pytest-json-ctrf writes
REWARD_JSON = "reward.json"
REWARD_TXT = "reward.txt"
MAX_NOTES = 20  # problems of a report, flags of a verdict: an agent can cause any number
MAX_NOTE_CHARACTERS = 500
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class Status(StrEnum):
    """What became of one assertion; only `passed` counts as a pass."""

    passed = "passed"
    failed = "failed"
    skipped = "skipped"  # also xfail: pytest-json-ctrf calls both so
    other = "other"


class Source(StrEnum):
    """Where assertions were read from."""

    ctrf = "ctrf"
    junit = "junit"
    reward_json = "reward.json"
    reward_txt = "reward.txt"
    nothing = "nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Assertions by name, the reward file beside them, and what could not be read."""

    source: Source
    assertions: dict[str, Status]
    rewards: dict[str, float]  # of the reward file; empty where none can be read
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", bounded(self.problems))

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(n for n, status in self.assertions.items() if status == Status.passed)

    @property
    def usable(self) -> bool:
        """False where nothing can be counted: no report, no test in it, or an unreadable one."""
        return bool(self.assertions)


def bounded(notes: Iterable[str]) -> tuple[str, ...]:
    """At most MAX_NOTES of them, none too long, and all of them text that UTF-8 can hold."""
    kept = [_note(note) for note in itertools.islice(notes, MAX_NOTES + 1)]
    return (*kept[: MAX_NOTES - 1], "… and more") if len(kept) > MAX_NOTES else tuple(kept)


def _note(note: str) -> str:
    text = note.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_NOTE_CHARACTERS else f"{text[: MAX_NOTE_CHARACTERS - 1]}…"


class UnreadableError(Exception):
    """A report whose content is not what its format says."""


Tests = list[tuple[str, Status]]
Parser = Callable[[str], Tests | None]  # None where the file is no report of this kind


def read(folder: Path) -> Report:
    """Reads a copy of /logs/verifier."""
    names = (path.name for path in folder.rglob("*"))
    problems = [f"{name!a} is no text" for name in names if not _is_text(name)]
    if problems:  # no verifier makes such a name: nothing here is believed
        return Report(source=Source.nothing, assertions={}, rewards={}, problems=tuple(problems))
    reward_file, rewards = _read_rewards(folder, problems)
    for source, pattern, parse in (
        (Source.ctrf, "*.json", parse_ctrf),
        (Source.junit, "*.xml", parse_junit),
    ):
        tests = _read_tests(sorted(folder.glob(pattern)), parse, problems)
        if tests is not None:
            return Report(
                source=source,
                assertions=_by_name(tests),
                rewards=rewards,
                problems=tuple(problems),
            )
    checks = {name: Status.passed if r >= 1 else Status.failed for name, r in rewards.items()}
    if not checks and not problems:
        problems.append("no report: neither CTRF nor JUnit nor a reward file")
    return Report(
        source=reward_file if checks else Source.nothing,
        assertions=checks,
        rewards=rewards,
        problems=tuple(problems),
    )


def _read_tests(paths: Iterable[Path], parse: Parser, problems: list[str]) -> Tests | None:
    """The tests of all reports of one kind; None where there is none, readable or not."""
    tests: Tests | None = None
    broken = False
    for path in paths:
        if path.name == REWARD_JSON:
            continue
        try:
            found = _checked(parse(_read_text(path)))
        except UnreadableError as error:
            problems.append(f"{path.name}: {error}")
            broken = True
            continue
        if found is None and path.name == CTRF_JSON:
            problems.append(f"{path.name}: no CTRF report (it has no results)")
        if found is not None:
            tests = (tests or []) + found
            if not found:
                problems.append(f"{path.name}: no test was collected")
    return [] if tests is None and broken else tests


def _checked(tests: Tests | None) -> Tests | None:
    """Refuses names that are no text: lone surrogates, which no file can hold."""
    for name, _ in tests or ():
        if not _is_text(name):
            raise UnreadableError(f"a test's name is no text: {_short(name)}")
    return tests


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _by_name(tests: Tests) -> dict[str, Status]:
    """One entry a name; a name that occurs twice passes only where it passed each time."""
    found: dict[str, Status] = {}
    for name, status in tests:
        if found.get(name, Status.passed) == Status.passed:
            found[name] = status
    return found


def parse_ctrf(text: str) -> Tests | None:
    """Tests of a CTRF document, whose summary has to agree with its list."""
    fields = _parse_json(text)
    if not isinstance(fields, dict) or "results" not in fields:
        return None
    try:
        summary, listed = fields["results"]["summary"], fields["results"]["tests"]
        tests = [(str(test["name"]), _ctrf_status(test["status"])) for test in listed]
        counted = (int(summary["tests"]), int(summary["passed"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(f"no CTRF report ({type(error).__name__}: {error})") from None
    passed = sum(status == Status.passed for _, status in tests)
    if counted != (len(tests), passed):
        raise UnreadableError(
            f"the summary says {counted[1]} of {counted[0]} passed, the list {passed} of "
            f"{len(tests)}"
        )
    return tests


def _ctrf_status(text: str) -> Status:
    return Status(text) if text in ("passed", "failed", "skipped") else Status.other


def parse_junit(text: str) -> Tests | None:
    """Tests of a JUnit document, named `class::name`."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UnreadableError("a document type or entities, which no test report has")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UnreadableError(f"no XML: {error}") from None
    if root.tag not in ("testsuites", "testsuite"):
        return None
    return [(_junit_name(case), _junit_status(case)) for case in root.iter("testcase")]


def _junit_name(case: ElementTree.Element) -> str:
    parts = (case.get("classname"), case.get("name"))
    return "::".join(part for part in parts if part)


def _junit_status(case: ElementTree.Element) -> Status:
    if case.find("failure") is not None or case.find("error") is not None:
        return Status.failed
    return Status.skipped if case.find("skipped") is not None else Status.passed


def _read_rewards(folder: Path, problems: list[str]) -> tuple[Source, dict[str, float]]:
    """reward.json where it exists, else reward.txt; empty where it is not what it should be."""
    for source, parse in (
        (Source.reward_json, _parse_reward_json),
        (Source.reward_txt, _parse_reward_txt),
    ):
        path = folder / source.value
        if not path.exists() and not path.is_symlink():
            continue
        try:
            return source, parse(_read_text(path))
        except UnreadableError as error:
            problems.append(f"{path.name}: {error}")
            return source, {}
    return Source.nothing, {}


def _parse_reward_json(text: str) -> dict[str, float]:
    fields = _parse_json(text)
    if not isinstance(fields, dict) or not fields:
        raise UnreadableError("expected {name: number, …}")
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnreadableError(f"{name} is {_short(value)}, no number")
        if not _is_text(name):
            raise UnreadableError(f"a name is no text: {_short(name)}")
        if not _is_finite(value):
            raise UnreadableError(f"{name} is {_short(value)}, not finite")
    return {name: float(value) for name, value in fields.items()}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is too large for one
        return False


def _parse_reward_txt(text: str) -> dict[str, float]:
    if not NUMBER.fullmatch(text.strip()):
        raise UnreadableError(f"{_short(text)} is no finite number")
    reward = float(text)
    if not math.isfinite(reward):
        raise UnreadableError(f"{reward} is not finite")
    return {"reward": reward}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"no JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _read_text(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        raise UnreadableError("no regular file")
    size = path.stat().st_size
    if size > MAX_REPORT_BYTES:
        raise UnreadableError(f"{size} bytes, more than {MAX_REPORT_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"byte {error.start} is no UTF-8") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"

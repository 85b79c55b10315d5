"""The audit's JSONL: appended line by line, resumed, summed up in a table, and chosen from."""

import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from sandbox.audit import Decision, Record
from sandbox.static_checks import content_digest
from sandbox.verify import Baseline
from t1jax.errors import UserError


def read(path: Path) -> list[Record]:
    """All complete lines, the later of two for the same task; each that is no record is warned of.

    A last line without its end was never finished and is left.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    records = {}
    for number, line in enumerate(lines, 1):
        try:
            record = Record.from_line(line.decode())
        except (ValueError, TypeError, KeyError):
            warnings.warn(
                f"{path} line {number} is no audit record: skipped; "
                "`t1jax audit` audits that task again",
                stacklevel=2,
            )
            continue
        records[record.path] = record
    return list(records.values())


class AuditFile:
    """Takes records as they come; what is written stays whatever happens to the process."""

    def __init__(self, path: Path):
        self.path = path
        self.records = {record.path: record for record in read(path)} if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._drop_half_line()

    def _drop_half_line(self) -> None:
        """A process that was killed while it wrote leaves half a line: it must not be glued to."""
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete != len(content):
            os.truncate(self.path, complete)

    def is_done(self, root: Path) -> bool:
        """True where this task, with these files, has its line already."""
        known = self.records.get(str(root))
        if known is None or known.decision == Decision.infra_error:
            return False
        try:
            return known.digest == content_digest(root)
        except OSError:
            return False

    def add(self, record: Record) -> None:
        self.records[record.path] = record
        self._file.write(record.to_line().encode("utf-8", "backslashreplace"))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def table(records: Iterable[Record]) -> Table:
    """How many tasks were decided how, with every reason, the most common first."""
    records = list(records)
    shown = Table(title=f"{len(records)} tasks", title_justify="left")
    for column in ("decision", "tasks", "assertions", "free", "s a trial", "reason"):
        shown.add_column(column, justify="left" if column in ("decision", "reason") else "right")
    for decision in Decision:
        chosen = [record for record in records if record.decision == decision]
        if chosen:
            shown.add_row(decision.value, str(len(chosen)), *_figures(chosen))
    return shown


def _figures(records: list[Record]) -> tuple[str, str, str, str]:
    assertions = sum(len(record.oracle_passed) for record in records)
    free = sum(len(record.nop_passed) for record in records)
    trials = [sum(stages.values()) for record in records for stages in record.seconds.values()]
    reasons = Counter(
        reason.split(":")[0][:60] for record in records for reason in record.reasons
    ).most_common()
    return (
        str(assertions),
        str(free),
        f"{sum(trials) / len(trials):.2f}" if trials else "-",
        "\n".join(f"{reason} ({count})" for reason, count in reasons),
    )


def select(
    path: Path,
    *,
    keep: Iterable[str] = (Decision.accept,),
    seed: int = 0,
    count: int | None = None,
    min_score: float | None = None,
) -> list[Record]:
    """Records of the kept decisions in an order that depends on the seed alone.

    Raises:
      UserError: a decision is unknown, or nothing is left.
    """
    wanted = set(keep)
    unknown = sorted(wanted - {decision.value for decision in Decision})
    if unknown:
        raise UserError(f"no decision {unknown}; there are {[d.value for d in Decision]}")
    chosen = [record for record in read(path) if record.decision in wanted]
    if min_score is not None:
        chosen = [r for r in chosen if r.score is not None and r.score["total"] >= min_score]
    if not chosen:
        raise UserError(f"{path} has no task that is {' or '.join(sorted(wanted))}; keep others")
    chosen.sort(key=lambda record: (record.digest, record.path))
    random.Random(seed).shuffle(chosen)
    return chosen[: len(chosen) if count is None else count]


def list_line(record: Record) -> str:
    """One task of a list: where it is, and what its verdicts are measured against."""
    fields = {
        "path": record.path,
        "task": record.task,
        "digest": record.digest,
        "oracle_passed": record.oracle_passed,
        "nop_passed": record.nop_passed,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def baseline_of(path: Path, root: Path) -> Baseline:
    """What the audit recorded of a task with these files.

    Raises:
      UserError: the audit has no such task, or not with these files.
    """
    digest = content_digest(root)
    for record in read(path):
        if record.digest == digest and record.oracle_passed:
            return Baseline(
                oracle_passed=frozenset(record.oracle_passed),
                nop_passed=frozenset(record.nop_passed),
            )
    raise UserError(f"{path} has no audit of {root} as it is now; run t1jax audit on it")

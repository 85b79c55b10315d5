"""What a run's stages are, which of them are done, and by which config.

    RUN/stages/NAME.json     of a finished stage, written last: what it was made from, its seconds
    RUN/stages/NAME.begun    of one that has begun, written before its work: the same, less seconds
    RUN/stages.jsonl         a line a pass: stage, seconds, when it began and ended
    RUN/stages/lock          held while a process works in the run

A stage is made from a part of the config and from other stages. Where that has changed, the run is
refused before any work: nothing finished is silently used again, and nothing is silently redone.
Knows nothing of what stages do.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t1jax.config import Config
from t1jax.errors import UserError
from t1jax.pipeline.learning import leaves, may_change
from t1jax.pipeline.trials import write_json

FOLDER, TIMES = "stages", "stages.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a run, which is done or not."""

    name: str
    command: str  # that does the same alone
    after: tuple[str, ...]  # stages whose outputs it reads
    reads: tuple[str, ...]  # keys of the config that its outputs depend on
    writes: tuple[Path, ...]  # outputs; each is there when the stage is done
    work: Callable[[], None]
    leaves_behind: tuple[Path, ...] = ()  # besides, of use to nobody else


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a stage was made from."""

    stage: str
    config: dict[str, Any]  # values by the whole path of their keys
    inputs: dict[str, str]  # the identities of the stages that it reads

    @property
    def identity(self) -> str:
        """The same for the same parts."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Records:
    """The records of one run's stages."""

    def __init__(self, config: Config, stages: Sequence[Stage]):
        self._run = Path(config.run)
        self._folder = self._run / FOLDER
        self._stages = stages
        self._made = _made(config, stages)

    @property
    def empty(self) -> bool:
        """Whether no stage has begun."""
        return not any(self._folder.glob("*.begun"))

    @property
    def done(self) -> frozenset[str]:
        """The finished stages."""
        return frozenset(stage.name for stage in self._stages if self.finished(stage))

    def check(self) -> None:
        """Compares every record with the config.

        Raises:
          UserError: a stage has begun with another config, or from other inputs; an output is gone.
        """
        for stage in self._stages:
            self._compare(stage, self._file(stage, "begun"), going_on=not self.finished(stage))
            self._compare(stage, self._file(stage, "json"), going_on=False)
            gone = [path for path in stage.writes if not path.exists()]
            if self.finished(stage) and gone:
                raise UserError(
                    f"stage {stage.name} is finished and {gone[0]} is gone; put it back, or run "
                    f"again with --redo {_quoted(stage)}"
                )

    def finished(self, stage: Stage) -> bool:
        """Whether the stage's record is there."""
        return self._file(stage, "json").is_file()

    def seconds(self, stage: Stage) -> float:
        """Of a finished stage, all its passes together."""
        return float(_read(self._file(stage, "json"))["seconds"])

    @contextlib.contextmanager
    def doing(self, stage: Stage) -> Iterator[None]:
        """Around a stage's work: notes that it has begun, its seconds, and that it is done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        made = self._made[stage.name]
        write_json(self._file(stage, "begun"), dataclasses.asdict(made))
        began = time.time()
        try:
            yield
        except BaseException:
            self._spent(stage, began)
            raise
        lacking = [str(path) for path in stage.writes if not path.exists()]
        assert not lacking, f"stage {stage.name} ended without {lacking}"
        seconds = self._spent(stage, began)
        outputs = [str(path) for path in stage.writes]
        record = dataclasses.asdict(made) | {"seconds": seconds, "outputs": outputs}
        write_json(self._file(stage, "json"), record)

    def forget(self, name: str) -> list[str]:
        """Removes what a stage and those after it made, and their records; which they were.

        Raises:
          UserError: the run has no such stage.
        """
        names = [stage.name for stage in self._stages]
        if name not in names:
            raise UserError(f"--redo {name!r}: this run's stages are {', '.join(names)}")
        gone = [name]
        for stage in self._stages:
            if set(stage.after) & set(gone):
                gone.append(stage.name)
        for stage in reversed([stage for stage in self._stages if stage.name in gone]):
            self._file(stage, "json").unlink(missing_ok=True)  # first: what follows may be ended
            for path in (*stage.writes, *stage.leaves_behind):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self._file(stage, "begun").unlink(missing_ok=True)
        return gone

    # ---- one record ----

    def _file(self, stage: Stage, suffix: str) -> Path:
        return self._folder / f"{stage.name.replace(' ', '-')}.{suffix}"

    def _compare(self, stage: Stage, file: Path, *, going_on: bool) -> None:
        if not file.is_file():
            return
        known, now = _read(file), self._made[stage.name]
        what = f"stage {stage.name} of {self._run} has {'begun' if going_on else 'ended'}"
        remedy = (
            "change it back, choose another `run:` folder, or run again with --redo "
            f"{_quoted(stage)}, which removes what that stage and those after it made"
        )
        keys = sorted(set(known["config"]) | set(now.config))
        for key in keys:
            before, value = (tree.get(key) for tree in (known["config"], now.config))
            if before != value and not (going_on and may_change(key)):
                raise UserError(f"{what} with {key}={before!r}, and now it is {value!r}; {remedy}")
        for name in sorted(set(known["inputs"]) | set(now.inputs)):
            if known["inputs"].get(name) != now.inputs.get(name):
                raise UserError(f"{what}, and stage {name} that it reads is another now; {remedy}")

    def _spent(self, stage: Stage, began: float) -> float:
        """Notes a pass; the seconds of all of them."""
        ended = time.time()
        line = {"stage": stage.name, "seconds": round(ended - began, 3),
                "began": round(began, 3), "ended": round(ended, 3)}  # fmt: skip
        with (self._run / TIMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        known = map(json.loads, (self._run / TIMES).read_text(encoding="utf-8").splitlines())
        return round(sum(each["seconds"] for each in known if each["stage"] == stage.name), 3)


def _made(config: Config, stages: Sequence[Stage]) -> dict[str, Made]:
    values = leaves(config.model_dump(mode="json"))
    made: dict[str, Made] = {}
    for stage in stages:
        made[stage.name] = Made(
            stage=stage.name,
            config={k: v for k, v in values.items() if _below(k, stage.reads)},
            inputs={name: made[name].identity for name in stage.after},
        )
    return made


def _below(key: str, sections: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in sections)


def _quoted(stage: Stage) -> str:
    return f"'{stage.name}'" if " " in stage.name else stage.name


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found["config"], found["inputs"] = dict(found["config"]), dict(found["inputs"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} is no record of a stage ({type(error).__name__}: {error}); remove it"
        ) from None
    return found


@contextlib.contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Holds the run's lock, which the system releases whatever ends the process.

    Raises:
      UserError: another process works in the run.
    """
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    with (run / FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another `t1jax run` works in {run}; wait for it, or choose another `run:` folder"
            ) from None
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield

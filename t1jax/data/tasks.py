"""Which tasks a step plays: a split or a list, shuffled anew in every pass over it.

Lists may be stored in order of quality, so the shuffle is not an option. Knows where a task's
directory is and nothing of what is in it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import grain

from t1jax.errors import UserError

TASK_FILE = "task.toml"


def task_folders(folder: str, which: str) -> tuple[Path, ...]:
    """Directories of the tasks in a split or a list, in stored order.

    Args:
      folder: what `t1jax tasks make` wrote, or any folder of tasks.
      which: a split (a folder in it), or a list that `t1jax tasks select` wrote (a path, or the
        name of a file in it).

    Raises:
      UserError: there is neither, a line of the list is none, a task is missing, or all are.
    """
    root = Path(folder)
    split = root / which
    if split.is_dir():
        found = tuple(sorted(file.parent for file in split.glob(f"*/{TASK_FILE}")))
        where = split
    else:
        where = next((path for path in (split, Path(which)) if path.is_file()), split)
        if not where.is_file():
            raise UserError(
                f"tasks {which!r}: neither {split} nor {Path(which)} exists; expected a split "
                "that `t1jax tasks make` wrote, or a list that `t1jax tasks select` wrote"
            )
        found = _read_list(where, root)
    if not found:
        raise UserError(f"{where} holds no task; expected directories with a {TASK_FILE}")
    return found


def _read_list(file: Path, root: Path) -> tuple[Path, ...]:
    tasks = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            path = Path(json.loads(line)["path"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{file}:{number} is no task: {line[:80]!r}; expected JSON with a "path"'
            ) from None
        places = [place for place in (path, file.parent / path, root / path) if place.is_dir()]
        if not places:
            raise UserError(f"{file}:{number}: {path} is no directory; select the tasks again")
        tasks.append(places[0])
    return tuple(tasks)


class Schedule:
    """The tasks of each step. A step's depend on the seed and its number alone."""

    def __init__(self, tasks: Sequence[Path], *, launch: int, group: int, seed: int):
        if launch % group:
            raise UserError(
                f"ppo.launch={launch} is no multiple of ppo.group={group}: every task is "
                "attempted so many times"
            )
        self._order = grain.MapDataset.source(tasks).seed(seed).shuffle().repeat()
        self._tasks, self._group = launch // group, group

    def of(self, step: int) -> list[Path]:
        """A task for each trial of the step; attempts at one task stand together."""
        first = step * self._tasks
        chosen = [self._order[i] for i in range(first, first + self._tasks)]
        return [task for task in chosen for _ in range(self._group)]

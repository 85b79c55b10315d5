"""Directories that are either complete or visibly not: made aside, then renamed.

On a local disk the work happens in `NAME.incomplete` beside the destination, which appears by one
rename at the end. Object stores have no such rename, so there the work happens in place with a
file `INCOMPLETE` inside, removed last. Leftovers of a killed run are removed by the next one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from etils import epath

from t1jax.checkpoint.tensor_files import is_local
from t1jax.errors import UserError

MARK = "INCOMPLETE"


@contextmanager
def staged(dst: epath.PathLike, needed_bytes: int) -> Iterator[epath.Path]:
    """Gives an empty directory to fill; it becomes `dst` when the block ends without an error.

    Raises:
      UserError: something is at `dst` already, or the disk has fewer than `needed_bytes` free.
    """
    dst = epath.Path(dst)
    local = is_local(dst)
    work = dst.parent / f"{dst.name}.incomplete" if local else dst
    _refuse_occupied(dst)
    if work.exists():
        work.rmtree()
    work.mkdir(parents=True)
    if local:
        _refuse_full_disk(work, needed_bytes)
    else:
        (work / MARK).write_text("t1jax is writing here, or was ended while it did\n")
    try:
        yield work
        if local:
            os.replace(work, dst)
        else:
            (work / MARK).unlink()
    except BaseException:
        work.rmtree(missing_ok=True)
        raise


def _refuse_occupied(dst: epath.Path) -> None:
    if not dst.exists():
        return
    if not dst.is_dir():
        raise UserError(f"{dst} is a file; expected a directory that does not exist yet")
    if any(dst.iterdir()) and not (dst / MARK).exists():
        raise UserError(f"{dst} exists and is not empty; remove it or choose another destination")


def _refuse_full_disk(work: epath.Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        work.rmdir()
        raise UserError(
            f"{work.parent} has {free_bytes / 1e9:.1f} GB free and {needed_bytes / 1e9:.1f} GB "
            "are needed; free some space or choose another disk"
        )

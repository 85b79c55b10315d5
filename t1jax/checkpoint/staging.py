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
      UserError: something is at `dst` already, it cannot be made there, or the disk has fewer than
        `needed_bytes` free.
    """
    dst = epath.Path(dst)
    local = is_local(dst)
    _refuse_occupied(dst)
    work = dst.parent / f"{dst.name}.incomplete" if local else dst
    _make_empty(work)
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


def refuse_overlap(dst: epath.PathLike, src: epath.PathLike) -> None:
    """Refuses a destination inside the source, and one whose working directory is the source's."""
    at, source = _absolute(dst), _absolute(src)
    if at.startswith(source):
        raise UserError(f"{dst} is inside the source {src}; choose a destination outside it")
    if source.startswith(f"{at[:-1]}.incomplete/"):
        raise UserError(
            f"{src} is where {dst} would be made, and is emptied for that; choose another "
            "destination, or rename the source"
        )


def _absolute(path: epath.PathLike) -> str:
    """The path without links, ending in one slash, so that one is inside another by its prefix."""
    local = is_local(epath.Path(path))
    return (os.path.realpath(path) if local else os.fspath(path)).rstrip("/") + "/"


def _make_empty(work: epath.Path) -> None:
    try:
        if work.exists():
            work.rmtree()
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot make {work}: {error.strerror or error}; choose a destination in a directory "
            "that you can write to"
        ) from None


def _refuse_occupied(dst: epath.Path) -> None:
    if is_local(dst):
        _refuse_irreplaceable(dst)
    if not dst.exists():
        return
    if not dst.is_dir():
        raise UserError(f"{dst} is a file; expected a directory that does not exist yet")
    if any(dst.iterdir()) and not (dst / MARK).exists():
        raise UserError(f"{dst} exists and is not empty; remove it or choose another destination")


def _refuse_irreplaceable(dst: epath.Path) -> None:
    """What the rename at the end could not replace, noticed before the work and not after it."""
    if dst.name in ("", ".."):
        raise UserError(f"{dst} is no name of a directory to make; name one, such as {dst}/new")
    if os.path.islink(dst):
        raise UserError(
            f"{dst} is a link to {os.readlink(dst)}; expected a directory that does not exist yet"
        )
    if os.path.ismount(dst):
        raise UserError(f"{dst} is a mount point; name a new directory inside it")


def _refuse_full_disk(work: epath.Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        work.rmdir()
        raise UserError(
            f"{work.parent} has {free_bytes / 1e9:.1f} GB free and {needed_bytes / 1e9:.1f} GB "
            "are needed; free some space or choose another disk"
        )

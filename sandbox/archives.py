"""Tar archives between host and sandbox: packed as they are, unpacked with suspicion.

What comes out of a sandbox was made by the agent: its members may name any path, link anywhere, or
claim any size. Nothing is unpacked outside the destination, and no more than was allowed.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path

from sandbox.base import Archive, TooLargeError, UnsafeArchiveError
from t1jax.errors import UserError

IN_MEMORY_BYTES = 8 << 20
MAX_MEMBERS = 200_000


def spool() -> tempfile.SpooledTemporaryFile[bytes]:
    """A nameless file, in memory while it is small; nothing is left of it when the process dies."""
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)


def pack(src: Path, name: str) -> Archive:
    """A file or directory as the member `name`, owned by root, with its modes and links."""
    if not src.exists():
        raise UserError(f"{src} does not exist; expected a file or directory to upload")
    file = spool()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(src, arcname=name, filter=_owned_by_root)
    file.seek(0)
    return Archive(file)


def unpack(archive: Archive, dst: Path, *, max_bytes: int) -> None:
    """Writes the archive's one top-level member as `dst`, which appears complete or not at all."""
    if dst.exists():
        raise UserError(f"{dst} exists already; expected a new path to download to")
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dst.name}-", dir=dst.parent))
    try:
        _extract(archive, work, max_bytes)
        found = list(work.iterdir())
        if len(found) != 1:
            raise UnsafeArchiveError(f"download refused: {len(found)} files or directories, not 1")
        found[0].rename(dst)
    finally:
        shutil.rmtree(work)


def _extract(archive: Archive, work: Path, max_bytes: int) -> None:
    archive.file.seek(0)
    written_bytes = 0
    try:
        with tarfile.open(fileobj=archive.file, mode="r:") as tar:
            for count, member in enumerate(tar):
                if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
                    continue  # devices and pipes have no content
                written_bytes += member.size
                if written_bytes > max_bytes or count >= MAX_MEMBERS:
                    raise TooLargeError(
                        f"download of more than {max_bytes} bytes or {MAX_MEMBERS} files"
                    )
                tar.extract(member, work, set_attrs=member.isfile(), filter=_readable)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UnsafeArchiveError(f"download refused: {error}") from error


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _readable(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Python's `data` filter (no path or link leads out), and what we may read and remove."""
    safe = tarfile.data_filter(member, path)
    return safe.replace(mode=(safe.mode or 0o644) | (0o700 if safe.isdir() else 0o600), deep=False)

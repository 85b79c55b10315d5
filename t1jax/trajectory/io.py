"""Trajectories on disk: a directory that is either complete or visibly not.

    NAME/trajectory.json        task, outcome, reward, timings, boundary counts, turns, checksums
    NAME/chunk-0.safetensors    ids, mask, logprobs, versions, routes, recorded (one file a chunk)

While an episode runs, `Writer` appends every change to NAME.incomplete/events.log. At the end the
files above are written there and the directory is renamed. A killed writer leaves NAME.incomplete,
of which `recover` reads all changes that were written whole. Local disks only.
"""

import dataclasses
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save, save_file

from t1jax.errors import UserError
from t1jax.trajectory.record import (
    COLUMNS,
    Chunk,
    Ending,
    Finish,
    LogprobKind,
    RouteShape,
    Rule,
    Sampling,
    Trajectory,
    Turn,
)
from t1jax.trajectory.recorder import PLAIN, Recorder

FORMAT = 1
DOCUMENT = "trajectory.json"
LOG = "events.log"
INCOMPLETE = ".incomplete"
FRAME = struct.Struct("<4sII")  # magic, bytes, crc32 of the bytes; a safetensors blob follows
MAGIC = b"T1EV"

Path_ = str | os.PathLike[str]


# ---- finished trajectories ----------------------------------------------------------------------


def save_trajectory(trajectory: Trajectory, path: Path_) -> None:
    """Writes a directory, which appears whole.

    Raises:
      UserError: something is at `path` already.
    """
    work = _begin(Path(path))
    try:
        _write(trajectory, work)
    except BaseException:
        shutil.rmtree(work)
        raise
    os.replace(work, path)


def load_trajectory(path: Path_) -> Trajectory:
    """Reads and checks a trajectory.

    Raises:
      UserError: it does not exist, is incomplete, damaged, or cannot have happened.
    """
    path = Path(path)
    document = read_document(path)
    try:
        chunks = tuple(
            _load_chunk(path / f"chunk-{number}.safetensors", fields)
            for number, fields in enumerate(document["chunks"])
        )
        ending = Ending(
            **{field.name: document[field.name] for field in dataclasses.fields(Ending)}
        )
        return Trajectory(chunks=chunks, ending=ending)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path / DOCUMENT} lacks or misspells a field: {error}") from None
    except (UserError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def read_document(path: Path) -> dict[str, Any]:
    """trajectory.json alone: enough for tables of many trajectories."""
    try:
        document = json.loads((path / DOCUMENT).read_text())
    except FileNotFoundError:
        raise _absent(path) from None
    except ValueError as error:
        raise UserError(f"{path / DOCUMENT} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path / DOCUMENT} is not a trajectory of format {FORMAT}; a newer t1jax "
                        "wrote it, or it is something else")  # fmt: skip
    return document


def _absent(path: Path) -> UserError:
    partial = path if path.name.endswith(INCOMPLETE) else path.with_name(path.name + INCOMPLETE)
    if (partial / LOG).exists():
        return UserError(
            f"{path} is incomplete: its writer still runs or was ended; "
            f"t1jax.trajectory.io.recover({str(partial)!r}) reads what was written"
        )
    return UserError(f"{path} holds no {DOCUMENT}; expected the directory of a trajectory")


def _begin(path: Path) -> Path:
    """An empty directory beside the destination; leftovers of an ended writer go."""
    if path.exists():
        raise UserError(f"{path} exists; remove it or choose another destination")
    work = path.with_name(path.name + INCOMPLETE)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def _write(trajectory: Trajectory, work: Path) -> None:
    chunks = []
    for number, chunk in enumerate(trajectory.chunks):
        columns = {name: np.ascontiguousarray(getattr(chunk, name)) for name in COLUMNS}
        save_file(columns, work / f"chunk-{number}.safetensors", {"format": "t1jax trajectory"})
        chunks.append(_chunk_fields(chunk, columns))
    document = {
        "format": FORMAT,
        **_plain(trajectory.ending),
        "boundaries": trajectory.boundaries,
        "tokens": sum(len(chunk) for chunk in trajectory.chunks),
        "sampled_tokens": sum(chunk.sampled_tokens for chunk in trajectory.chunks),
        "chunks": chunks,
    }
    (work / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n")


def _chunk_fields(chunk: Chunk, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "tokens": len(chunk),
        "sampled_tokens": chunk.sampled_tokens,
        "missing_rows": chunk.missing_rows,
        "logprob_kind": str(chunk.logprob_kind),
        "sampling": _plain(chunk.sampling),
        "shape": _plain(chunk.shape),
        "turns": [_plain(turn) | {"rule": turn.rule.value} for turn in chunk.turns],
        "crc32": {name: _checksum(values) for name, values in columns.items()},
    }


def _load_chunk(file: Path, fields: Mapping[str, Any]) -> Chunk:
    try:
        columns = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file.name} cannot be read: {error}") from None
    for name in COLUMNS:
        if name not in columns or _checksum(columns[name]) != fields["crc32"][name]:
            raise UserError(f"{file.name}: {name} is damaged or missing; its checksum is not the "
                            f"one in {DOCUMENT}")  # fmt: skip
    return Chunk(
        **{name: columns[name] for name in COLUMNS},
        turns=tuple(_turn(turn) for turn in fields["turns"]),
        shape=RouteShape(**fields["shape"]),
        sampling=Sampling(**fields["sampling"]),
        logprob_kind=LogprobKind(fields["logprob_kind"]),
    )


def _turn(fields: Mapping[str, Any]) -> Turn:
    kinds = {"rule": Rule(fields["rule"]), "finish": Finish(fields["finish"])}
    return Turn(**(dict(fields) | kinds))


def _plain(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)


# ---- while an episode runs ----------------------------------------------------------------------


class Writer:
    """Writes a trajectory as it comes to be. `recorder` takes the tokens.

    As a context manager it keeps NAME.incomplete where the block ends without `finish`.
    """

    def __init__(
        self,
        path: Path_,
        shape: RouteShape,
        *,
        sampling: Sampling = PLAIN,
        logprob_kind: LogprobKind = LogprobKind.raw,
    ):
        self._path = Path(path)
        self._work = _begin(self._path)
        self._log: BinaryIO = (self._work / LOG).open("wb")
        facts = {"shape": _plain(shape), "sampling": _plain(sampling), "format": FORMAT}
        self._write("begin", facts | {"logprob_kind": str(logprob_kind)}, {})
        self.recorder = Recorder(
            shape, sampling=sampling, logprob_kind=logprob_kind, listener=self._write
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._log.close()

    def finish(self, ending: Ending) -> Trajectory:
        """Checks, writes and renames; the trajectory is then at the path that was asked for."""
        trajectory = self.recorder.finish(ending)
        self._log.close()
        if self._path.exists():
            raise UserError(f"{self._path} came to be while its trajectory was written to "
                            f"{self._work}; only one writer may have it")  # fmt: skip
        _write(trajectory, self._work)
        (self._work / LOG).unlink()
        os.replace(self._work, self._path)
        return trajectory

    def _write(
        self, event: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Appends a frame and gives it to the operating system, which outlives a killed writer."""
        # One spare tensor: safetensors has no file without any.
        tensors = {**arrays, "": np.zeros(0, np.uint8)}
        blob = save(tensors, {"event": event, "facts": json.dumps(dict(facts))})
        self._log.write(FRAME.pack(MAGIC, len(blob), zlib.crc32(blob)) + blob)
        self._log.flush()


def recover(path: Path_) -> Recorder:
    """What an ended writer had written whole, as a recorder that can go on or be finished.

    Raises:
      UserError: there is no log, or not even its beginning is whole.
    """
    file = Path(path) / LOG
    if not file.exists():
        raise UserError(f"{path} holds no {LOG}; expected what an ended writer left, "
                        f"NAME{INCOMPLETE}")  # fmt: skip
    with file.open("rb") as stream:
        frames = _frames(stream)
        event, facts, _ = next(frames, ("", {}, {}))
        if event != "begin":
            raise UserError(f"{file} has no whole beginning; nothing of the episode was written")
        recorder = Recorder(
            RouteShape(**facts["shape"]),
            sampling=Sampling(**facts["sampling"]),
            logprob_kind=LogprobKind(facts["logprob_kind"]),
        )
        for frame in frames:
            recorder.replay(*frame)
    return recorder


Frame = tuple[str, dict[str, Any], dict[str, np.ndarray]]


def _frames(stream: BinaryIO) -> Iterator[Frame]:
    """Frames up to the first that is not whole."""
    while len(head := stream.read(FRAME.size)) == FRAME.size:
        magic, length, checksum = FRAME.unpack(head)
        if magic != MAGIC:
            return
        blob = stream.read(length)
        if len(blob) < length or zlib.crc32(blob) != checksum:
            return
        (header,) = struct.unpack("<Q", blob[:8])
        metadata = json.loads(blob[8 : 8 + header])["__metadata__"]
        yield metadata["event"], json.loads(metadata["facts"]), load(blob)

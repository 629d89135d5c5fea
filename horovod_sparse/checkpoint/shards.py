"""A checkpoint's files of tensors, written and read. Loading executes no code."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import IO, Any, cast

import torch

from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.checkpoint.folder import naming
from horovod_sparse.checkpoint.manifest import SHARED, Entry, Manifest, shard
from horovod_sparse.engine.state import require_finite

# What a file holds, and of which types.
_SHARED = {"model": dict, "optimizer": dict, "compression": dict | None, "others": dict}
_OWN = {"compression": dict | None, "generators": dict, "buffers": dict, "data": dict}


def write(folder: Path, name: str, content: dict[str, Any]) -> Entry:
    """Writes a file of a checkpoint that is not whole yet, down to the disk.

    Raises:
        CheckpointError: It cannot be written; names path and cause.
    """
    path = folder / name
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            sink = _Sink(file)
            torch.save(content, cast(IO[bytes], sink))
            sink.finish()
            file.flush()
            os.fsync(file.fileno())
    return Entry(sink.size, sink.digest.hexdigest())


def read_shared(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """The part that is the same on all ranks; raises as ``read_own``."""
    return _read(manifest, folder, SHARED, _SHARED)


def read_own(manifest: Manifest, folder: Path, rank: int) -> dict[str, Any]:
    """The part of one of the ranks that have saved.

    Raises:
        CheckpointError: It is not what was saved, or a training could not go on with it.
    """
    content = _read(manifest, folder, shard(rank), _OWN)
    try:
        _require_buckets(content["compression"])
        require_finite(content["compression"], "compression")
    except ValueError as error:
        raise CheckpointError(f"{folder / shard(rank)}: {error}") from error
    return content


def _require_buckets(compression: Any) -> None:
    buckets = [] if compression is None else compression.get("buckets")
    if not isinstance(buckets, list) or not all(isinstance(one, dict) and "parameters" in one for one in buckets):
        raise ValueError("compression holds no buckets: it is no part of a checkpoint")


def _read(manifest: Manifest, folder: Path, name: str, parts: dict[str, Any]) -> dict[str, Any]:
    with manifest.opened(folder, name) as file:
        try:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error!r:.300}") from error
    fits = isinstance(content, dict) and content.keys() == parts.keys()
    if not fits or not all(isinstance(content[part], kind) for part, kind in parts.items()):
        raise CheckpointError(f"{folder / name} does not hold {', '.join(parts)}: it is no part of a checkpoint")
    parts_by_name: dict[str, Any] = content
    return parts_by_name


class _Sink(io.RawIOBase):
    """Passes on what torch writes, and takes length and digest of it on the way.

    An error inside torch's writer would be replaced by one that does not name the cause: it is kept until ``finish``.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._error: OSError | None = None
        self.size = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
            self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def finish(self) -> None:
        if self._error is not None:
            raise self._error

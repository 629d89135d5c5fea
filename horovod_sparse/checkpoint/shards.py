"""Writing and reading of a checkpoint's tensor files. Reading executes no code."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import IO, Any, cast

import torch

from horovod_sparse.checkpoint.manifest import SHARED, CheckpointError, Entry, Manifest, naming, shard
from horovod_sparse.checkpoint.together import CALL, together
from horovod_sparse.control.lifecycle import process
from horovod_sparse.engine.state import require_finite
from horovod_sparse.transport.base import Transport

_BLOCK = 1 << 26  # bytes of a file that rank 0 sends at once

# Parts of each file, and their types.
_SHARED = {"model": dict, "optimizer": dict, "compression": dict | None, "others": dict, "layouts": list}
_OWN = {"compression": dict | None, "generators": dict, "buffers": dict, "data": dict, "shards": dict}


def write(folder: Path, name: str, content: dict[str, Any]) -> Entry:
    """Write a file of an incomplete checkpoint, and sync it to disk; an OSError names its path."""
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


def read_shared(manifest: Manifest, folder: Path, content: bytes = b"") -> dict[str, Any]:
    """Return the part that is the same on all ranks; raise CheckpointError if it is not what was saved.

    ``content`` is that of the file, if it has been read.
    """
    if content:
        return _parsed(io.BytesIO(content), folder / SHARED, _SHARED)
    return _read(manifest, folder, SHARED, _SHARED)


def content_of_rank_0(transport: Transport, manifest: Manifest, folder: Path, what: str) -> bytes:
    """Return the file with the part that is the same on all ranks, which only rank 0 has; a collective call."""
    content = b""
    with together(transport, what):
        if transport.rank == 0:
            with manifest.opened(folder, SHARED) as file:
                content = file.read()
    size = manifest.files[SHARED].bytes
    with process.communicating(CALL, transport):
        blocks = [transport.broadcast_object(content[at : at + _BLOCK]) for at in range(0, size, _BLOCK)]
    return b"".join(blocks)


def read_own(manifest: Manifest, folder: Path, rank: int) -> dict[str, Any]:
    """Return the part saved by one of the old ranks.

    Raises:
        CheckpointError: The file is not what was saved, has no buckets, or holds numbers that are not finite.
    """
    content = _read(manifest, folder, shard(rank), _OWN)
    try:
        buckets = [] if content["compression"] is None else content["compression"].get("buckets")
        if not isinstance(buckets, list) or not all(
            isinstance(bucket, dict) and "parameters" in bucket for bucket in buckets
        ):
            raise ValueError("compression holds no buckets: this is not a file of a checkpoint")
        require_finite(content["compression"], "compression")
    except ValueError as error:
        raise CheckpointError(f"{folder / shard(rank)}: {error}") from error
    return content


def map_own(manifest: Manifest, folder: Path, rank: int) -> dict[str, Any]:
    """Return the part saved by one of the old ranks, whose file another rank has read and verified.

    Tensors are read from the file when they are used.
    """
    return _read(manifest, folder, shard(rank), _OWN, mapped=True)


def _read(manifest: Manifest, folder: Path, name: str, parts: dict[str, Any], mapped: bool = False) -> dict[str, Any]:
    with (manifest.fitting if mapped else manifest.opened)(folder, name) as file:
        return _parsed(folder / name if mapped else file, folder / name, parts, mapped)


def _parsed(source: Any, path: Path, parts: dict[str, Any], mapped: bool = False) -> dict[str, Any]:
    try:
        content: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:  # not about the content
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error!r:.300}") from error
    fits = isinstance(content, dict) and content.keys() == parts.keys()
    if not fits or not all(isinstance(content[part], kind) for part, kind in parts.items()):
        raise CheckpointError(f"{path} does not hold {', '.join(parts)}: it is not a file of a checkpoint")
    return cast(dict[str, Any], content)


class _Sink(io.RawIOBase):
    """Writer that forwards torch's output to a file, and computes its length and SHA-256.

    Errors are raised by ``finish`` only: torch's writer would replace them with one that does not name the cause.
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

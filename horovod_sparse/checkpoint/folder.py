"""The folder of checkpoints: one folder each, made under another name and renamed when all of it is on the disk."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from horovod_sparse.checkpoint.manifest import Entry, Manifest
from horovod_sparse.checkpoint.together import CheckpointError

_LOG = logging.getLogger("horovod_sparse")
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"  # being written, or being deleted
_REPLACED = ".replaced"  # whole, until the new checkpoint of the same step has its name


class Folder:
    """The place of the checkpoints. Nothing here talks to other ranks.

    Args:
        path: The folder; made when something is saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, step: int) -> Path:
        """A whole checkpoint's folder."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """The folder in which a checkpoint is written before it is whole."""
        return _beside(self.of(step), _PARTIAL)

    def prepare(self) -> None:
        """Makes the folder, and cleans up after saves that were interrupted."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.recover()
        for leftover in [*self.path.glob(f"step-*{_PARTIAL}"), *self.path.glob(f"step-*{_REPLACED}")]:
            shutil.rmtree(leftover)

    def recover(self) -> None:
        """Gives a checkpoint its name back that was interrupted while it was replaced."""
        for replaced in self.path.glob(f"step-*{_REPLACED}"):
            name = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if not name.exists():
                replaced.rename(name)

    def write(self, step: int, name: str, content: dict[str, Any]) -> Entry:
        """Writes a file of a checkpoint that is not whole yet, down to the disk.

        Raises:
            CheckpointError: It cannot be written; names path and cause.
        """
        path = self.partial(step) / name
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                sink = _Sink(file)
                torch.save(content, cast(IO[bytes], sink))
                sink.finish()
                file.flush()
                os.fsync(file.fileno())
        return Entry(sink.size, sink.digest.hexdigest())

    def complete(self, step: int, ranks: int, files: dict[str, Entry]) -> None:
        """Gives a checkpoint its name, after all ranks have written; one that had it before is gone then.

        Raises:
            CheckpointError: A file that was written is not here, or something cannot be written.
        """
        partial, final = self.partial(step), self.of(step)
        for name, entry in files.items():
            path = partial / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise CheckpointError(
                    f"{path} was written, but is not there as rank 0 sees it: put the checkpoints on a file system "
                    "that all nodes share"
                )
        number = 1 + max((manifest.number for manifest in self.checkpoints()), default=0)
        replaced = _beside(final, _REPLACED)
        with _naming(partial):
            _sync(Manifest(step, number, ranks, files).write(partial))
            _sync(partial)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            _sync(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Removes what was written of a checkpoint that is not whole."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Deletes all but the newest checkpoints; what cannot be deleted is logged."""
        for manifest in self.checkpoints()[keep:]:
            old = self.of(manifest.step)
            try:
                gone = _beside(old, _PARTIAL)
                old.rename(gone)  # half deleted, it must not be taken for a whole one
                shutil.rmtree(gone)
            except OSError as error:
                _LOG.warning("%s could not be deleted: %s", old, error)

    def checkpoints(self) -> list[Manifest]:
        """The manifests of all checkpoints that have a readable one, newest first."""
        found = [manifest for step in self._steps() if (manifest := self._readable(step))]
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def _readable(self, step: int) -> Manifest | None:
        try:
            return self.manifest(step)
        except (OSError, CheckpointError) as error:
            _LOG.warning("not taken for a checkpoint: %s", error)
            return None

    def manifest(self, step: int) -> Manifest:
        """A checkpoint's manifest; CheckpointError when it is damaged or of another step."""
        manifest = Manifest.read(self.of(step))
        if manifest.step != step:
            raise CheckpointError(f"{self.of(step)} holds the manifest of step {manifest.step}: it is mixed up")
        return manifest

    def choose(self, step: int | None) -> Manifest | None:
        """The checkpoint of a step, or the newest; None when there is none at all.

        Raises:
            CheckpointError: There is none of this step, or its manifest is damaged, or that of the newest.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is no folder")
        self.recover()
        steps = self._steps()
        if step is None:
            readable = self.checkpoints()
            newest = readable[0] if readable else None
            damaged = max(set(steps) - {manifest.step for manifest in readable}, default=-1)
            # A damaged manifest does not tell when it was written: a higher step speaks for later than the others.
            return self.manifest(damaged) if damaged > (newest.step if newest else -1) else newest
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.path} holds no checkpoint of step {step}; there are: {there}")
        return self.manifest(step)

    def intact(self, besides: int | None) -> Manifest | None:
        """The newest checkpoint all of whose files are as they were saved, besides that of one step."""
        others = (manifest for manifest in self.checkpoints() if manifest.step != besides)
        return next((manifest for manifest in others if self._is_intact(manifest)), None)

    def _is_intact(self, manifest: Manifest) -> bool:
        try:
            for name in manifest.files:
                manifest.verify(self.of(manifest.step), name)
        except (OSError, CheckpointError):
            return False
        return True

    def _steps(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self.path.glob("step-*") if path.is_dir())
        return sorted(int(name[1]) for name in names if name)


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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one that names path and cause."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot do it for folders say so
            raise
    finally:
        os.close(descriptor)

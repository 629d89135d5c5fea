"""The folder of checkpoints: one folder each, made under another name and renamed when all of it is on the disk."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from horovod_sparse.checkpoint import lock
from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.checkpoint.manifest import Entry, Manifest

_LOG = logging.getLogger("horovod_sparse")
_NAME = re.compile(r"step-([0-9]{8,})")
_PARTIAL = ".partial"  # being written, or being deleted
_REPLACED = ".replaced"  # whole, until the new checkpoint of the same step has its name


class Folder:
    """The place of the checkpoints. Nothing here talks to other ranks.

    What changes the folder is for the process that holds its lock: ``prepare``, ``complete`` and ``prune``.

    Args:
        path: The folder; made when something is saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, step: int) -> Path:
        """The name of a whole checkpoint's folder."""
        return self.path / f"step-{step:08d}"

    def place(self, step: int) -> Path:
        """The folder that holds a whole checkpoint's files; it may have lost its name to one that has none yet."""
        final, replaced = self.of(step), _beside(self.of(step), _REPLACED)
        return final if os.path.lexists(final) or not replaced.is_dir() else replaced

    def partial(self, step: int, token: str) -> Path:
        """The folder in which a checkpoint is written before it is whole.

        Args:
            step: Of the training.
            token: Of this save alone: ranks of a job that is being ended may still write to another.
        """
        return _beside(self.of(step), f"{_PARTIAL}-{token}")

    def prepare(self) -> None:
        """Makes the folder, takes its lock, and cleans up after saves that were interrupted.

        Raises:
            CheckpointError: Another job has the lock, or the file system refuses.
        """
        with naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock.hold(self.path)
            for step in self.steps():
                if self.place(step) != self.of(step):
                    self.place(step).rename(self.of(step))
            for leftover in [*self.path.glob(f"step-*{_PARTIAL}*"), *self.path.glob(f"step-*{_REPLACED}")]:
                _remove(leftover)

    def complete(self, partial: Path, step: int, ranks: int, files: dict[str, Entry]) -> Manifest:
        """Gives a checkpoint its name, after all ranks have written; one that had it before is gone then.

        Args:
            partial: Its folder so far.
            step: Of the training.
            ranks: That have written.
            files: By their names.

        Raises:
            CheckpointError: A file that was written is not here, or something cannot be written.
        """
        final = self.of(step)
        for name, entry in files.items():
            path = partial / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise CheckpointError(
                    f"{path} was written, but is not there as rank 0 sees it: put the checkpoints on a file system "
                    "that all nodes share"
                )
        number = 1 + max((manifest.number for manifest in self.checkpoints()), default=0)
        manifest, replaced = Manifest(step, number, ranks, files), _beside(final, _REPLACED)
        with naming(partial):
            sync(manifest.write(partial))
            sync(partial)
            if os.path.lexists(final):
                final.rename(replaced)
            partial.rename(final)
            sync(self.path)
        with suppress(OSError):
            _remove(replaced)
        return manifest

    def discard(self, partial: Path) -> None:
        """Removes what was written of a checkpoint that is not whole."""
        shutil.rmtree(partial, ignore_errors=True)

    def prune(self, keep: int) -> list[Manifest]:
        """Deletes all but the newest checkpoints; gives those it has deleted, and logs what cannot be."""
        gone = []
        for manifest in self.checkpoints()[keep:]:
            old = self.of(manifest.step)
            try:
                leftover = self.partial(manifest.step, "deleted")
                old.rename(leftover)  # half deleted, it must not be taken for a whole one
                _remove(leftover)
                gone.append(manifest)
            except OSError as error:
                _LOG.warning("%s could not be deleted: %s", old, error)
        return gone

    def checkpoints(self) -> list[Manifest]:
        """The manifests of all checkpoints that have a readable one, newest first."""
        found = [manifest for step in self.steps() if (manifest := self._readable(step))]
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def manifest(self, step: int) -> Manifest:
        """A checkpoint's manifest; CheckpointError when it is damaged or of another step."""
        folder = self.place(step)
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link: put the folder itself in its place")
        manifest = Manifest.read(folder)
        if manifest.step != step:
            raise CheckpointError(f"{folder} holds the manifest of step {manifest.step}: it is mixed up")
        return manifest

    def choose(self, step: int | None, digest: str | None = None) -> Manifest | None:
        """The checkpoint of a step, or the newest; None when there is none at all and none was asked for.

        Raises:
            CheckpointError: There is none of this step, its manifest is damaged, or that of the newest, or it has
                another digest than was asked for.
        """
        manifest = self._choose(step)
        if digest is not None and (manifest is None or manifest.digest != digest):
            found = "nothing" if manifest is None else f"step {manifest.step} with digest {manifest.digest}"
            raise CheckpointError(
                f"{self.path} holds {found}, not a checkpoint with digest {digest}: it was changed, or another one is "
                "meant (`horovod-sparse checkpoint` lists them)"
            )
        return manifest

    def _choose(self, step: int | None) -> Manifest | None:
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is no folder")
        steps = self.steps()
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
            manifest.verify(self.place(manifest.step))
        except (OSError, CheckpointError):
            return False
        return True

    def _readable(self, step: int) -> Manifest | None:
        try:
            return self.manifest(step)
        except (OSError, CheckpointError) as error:
            _LOG.warning("not taken for a checkpoint: %s", error)
            return None

    def steps(self) -> list[int]:
        """Steps of all folders with the name of a whole checkpoint, and of whole ones whose successor has none yet."""
        names = [path.name for path in self.path.glob("step-*") if path.is_dir()]
        final = {step for name in names if (step := _step(name)) is not None}
        replaced = {step for name in names if (step := _step(name, _REPLACED)) is not None}
        return sorted(final | {step for step in replaced - final if self._is_readable(step)})

    def _is_readable(self, step: int) -> bool:
        try:
            self.manifest(step)
        except (OSError, CheckpointError):
            return False
        return True


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot do it for folders say so
            raise
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one that names path and cause."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _step(name: str, suffix: str = "") -> int | None:
    """The step that a folder's name tells; None for any other name."""
    match = _NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
    # No more zeros than the name would be given.
    return int(match[1]) if match and f"{int(match[1]):08d}" == match[1] else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)

"""Folder of checkpoints. Each is a subfolder, written under a temporary name and renamed once all of it is on disk."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from horovod_sparse.checkpoint import lock
from horovod_sparse.checkpoint.manifest import CheckpointError, Entry, Manifest, naming

_LOG = logging.getLogger("horovod_sparse")
_NAME = re.compile(r"step-([0-9]{8,})")
_MOST_RANKS = 1 << 16  # of a checkpoint with local files
_PARTIAL = ".partial"  # being written or deleted
_REPLACED = ".replaced"  # complete; deleted once the new checkpoint of the same step has its final name

_owners: dict[Hashable, Folder] = {}  # by lock file: what has saved there last


class Folder:
    """Folder that holds checkpoints. No method communicates with other ranks.

    After ``prepare``, which creates and locks the folder, the same process may call ``complete`` and ``prune``. A file
    that cannot be read is not damaged: every method but ``prune`` raises the OSError, which names the path.

    Args:
        path: Path of the folder.
        local: Whether it holds the files of one rank only.
    """

    def __init__(self, path: Path, local: bool = False) -> None:
        self.path, self.local = path, local
        self._last: int | None = None
        self.saved = False  # once, by `prepare`
        self.saving = False  # since `prepare`, until the caller has completed the checkpoint or failed

    def of(self, step: int) -> Path:
        """Return the final path of a checkpoint."""
        return self.path / f"step-{step:08d}"

    def place(self, step: int) -> Path:
        """Return the current path of a complete checkpoint: ``.replaced`` if its replacement was interrupted."""
        final, replaced = self.of(step), _with_suffix(self.of(step), _REPLACED)
        return final if os.path.lexists(final) or not replaced.is_dir() else replaced

    def partial(self, step: int, token: str) -> Path:
        """Return the temporary path of a save; the token keeps it apart from one that a stopping job still writes."""
        return _with_suffix(self.of(step), f"{_PARTIAL}-{token}")

    def prepare(self) -> None:
        """Create the folder, take its lock, and clean up after interrupted saves.

        Raises:
            CheckpointError: Another job holds the lock.
        """
        with naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_over(lock.hold(self.path))
            for step in self.steps():
                if self.place(step) != self.of(step):
                    self.place(step).rename(self.of(step))
            for leftover in [*self.path.glob(f"step-*{_PARTIAL}*"), *self.path.glob(f"step-*{_REPLACED}")]:
                _try_to_remove(leftover)

    def _take_over(self, key: Hashable) -> None:
        """Become the object of this process that saves to the folder: the last one that began to save there."""
        before = _owners.get(key, self)
        if before is not self and (before.saving or self.saved):
            raise CheckpointError(
                f"another Checkpoints object of this process saves to {self.path}, too, and each deletes files of the "
                "other: give each a folder of its own, or wait() for the last save of one before you use the next"
            )
        _owners[key] = self
        self.saving = self.saved = True

    @property
    def last_number(self) -> int:
        """Number of the newest save; 0 if there is none. Only this process saves after ``prepare``: it is read once."""
        if self._last is None:
            self._last = max((manifest.number for manifest in self.checkpoints()), default=0)
        return self._last

    def complete(self, partial: Path, manifest: Manifest, files: dict[str, Entry]) -> None:
        """Rename a checkpoint to its final path after all ranks have written it, replacing one of the same step.

        Args:
            partial: Temporary path.
            manifest: Manifest, which is written.
            files: Files of the manifest that this folder holds.

        Raises:
            CheckpointError: A file is missing or has the wrong length.
        """
        final = self.of(manifest.step)
        for name, entry in files.items():
            path = partial / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise CheckpointError(
                    f"{path} was written, but has vanished or changed: let nothing else write there"
                    if self.local
                    else f"{path} was written, but rank 0 does not see it complete: put the checkpoints on a file "
                    "system that all nodes share"
                )
        replaced = _with_suffix(final, _REPLACED)
        with naming(partial):
            sync(manifest.write(partial))
            sync(partial)
            if os.path.lexists(final):
                final.rename(replaced)
            partial.rename(final)
            self._last = manifest.number
            sync(self.path)
        _try_to_remove(replaced)

    def prune(self, keep: int) -> list[Manifest]:
        """Delete all but the newest ``keep`` checkpoints; return those deleted, and log failures to delete."""
        gone: list[Manifest] = []
        try:
            found = self.checkpoints()
        except OSError as error:
            _LOG.warning("no older checkpoints are deleted: %s", error)
            return gone
        for manifest in found[keep:]:
            old = self.of(manifest.step)
            try:
                leftover = self.partial(manifest.step, "deleted")
                old.rename(leftover)  # a partly deleted checkpoint must not look complete
                _remove(leftover)
                gone.append(manifest)
            except OSError as error:
                _LOG.warning("%s could not be deleted: %s", old, error)
        return gone

    def checkpoints(self) -> list[Manifest]:
        """Return the manifests of all checkpoints, newest first, without damaged ones, which are logged."""
        found = [manifest for step in self.steps() if (manifest := self._readable(step))]
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint; raise CheckpointError if it is damaged or of another step."""
        folder = self.place(step)
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link: put the folder itself in its place")
        manifest = Manifest.read(folder, _MOST_RANKS if self.local else 0)
        if manifest.step != step:
            raise CheckpointError(
                f"{folder} holds the manifest of step {manifest.step}: it was renamed or holds another checkpoint"
            )
        return manifest

    def choose(self, step: int | None, digest: str | None = None) -> Manifest | None:
        """Return the manifest of a step, or of the newest checkpoint; None if there is none and nothing is required.

        Raises:
            CheckpointError: There is no such checkpoint, its manifest is damaged, or its digest differs.
        """
        manifest = self._choose(step)
        if digest is not None and (manifest is None or manifest.digest != digest):
            found = "nothing" if manifest is None else f"step {manifest.step} with digest {manifest.digest}"
            raise CheckpointError(
                f"{self.path} holds {found}, not a checkpoint with digest {digest}: it was changed, or the digest is "
                "another checkpoint's (`horovod-sparse checkpoint` lists them)"
            )
        return manifest

    def _choose(self, step: int | None) -> Manifest | None:
        steps = self.steps()
        if step is None:
            readable = self.checkpoints()
            newest = readable[0] if readable else None
            damaged = max(set(steps) - {manifest.step for manifest in readable}, default=-1)
            # When a damaged manifest was written is unknown; it counts as the newest if its step is the highest.
            return self.manifest(damaged) if damaged > (newest.step if newest else -1) else newest
        if step not in steps:
            available = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.path} holds no checkpoint of step {step}; available: {available}")
        return self.manifest(step)

    def intact(self, besides: int | None) -> Manifest | None:
        """Return the newest checkpoint whose files are all as saved, except the one of step ``besides``."""
        for manifest in self.checkpoints():
            with suppress(CheckpointError):
                if manifest.step != besides:
                    manifest.verify(self.place(manifest.step))
                    return manifest
        return None

    def _readable(self, step: int, level: int = logging.WARNING) -> Manifest | None:
        try:
            return self.manifest(step)
        except CheckpointError as error:
            _LOG.log(level, "ignored a damaged checkpoint: %s", error)
            return None

    def steps(self) -> list[int]:
        """Return the steps of all folders at a final path, and of intact ones whose replacement was interrupted."""
        try:
            with os.scandir(self.path) as entries:  # Path.glob finds nothing where reading fails
                names = [entry.name for entry in entries if entry.name.startswith("step-") and entry.is_dir()]
        except FileNotFoundError:
            return []
        final = {step for name in names if (step := _step(name)) is not None}
        replaced = {step for name in names if (step := _step(name, _REPLACED)) is not None}
        return sorted(final | {step for step in replaced - final if self._readable(step, logging.DEBUG)})


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # from file systems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _step(name: str, suffix: str = "") -> int | None:
    """Return the step in a folder's name; None for any other name."""
    match = _NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
    # The name must be what `Folder.of` returns: no extra zeros.
    return int(match[1]) if match and f"{int(match[1]):08d}" == match[1] else None


def _try_to_remove(leftover: Path) -> None:
    """Remove a path, if there is one; log a failure, as of a file that a stopping job writes, or has open over NFS."""
    try:
        with suppress(FileNotFoundError):
            _remove(leftover)
    except OSError as error:
        _LOG.warning("%s could not be deleted: %s", leftover, error)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)

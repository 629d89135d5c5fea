"""The list of a checkpoint's files, by which it is known to be whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import horovod_sparse
from horovod_sparse.checkpoint.errors import CheckpointError

NAME = "manifest.json"
SHARED = "shared.pt"
_FORMAT = 2
_MOST = 2**63 - 1  # of any number in it
_HEAD_BYTES, _ENTRY_BYTES = 4096, 512  # more than a manifest can need, for itself and for each file in its folder
_HEXADECIMAL = frozenset("0123456789abcdef")


def shard(rank: int) -> str:
    """Name of the file that only one rank writes."""
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True)
class Entry:
    """A file's length and the SHA-256 of its content, in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """List of all that makes a checkpoint whole.

    Attributes:
        step: Of the training.
        number: Of the save; the newest checkpoint has the highest, whatever its step.
        ranks: That saved it.
        files: By their names.
    """

    step: int
    number: int
    ranks: int
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        """Length of all files in bytes."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 over everything in the manifest, and so over the content of all files; hexadecimal digits."""
        content = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def write(self, folder: Path) -> Path:
        """Writes the manifest into a folder; gives its path."""
        about = {"format": _FORMAT, "horovod_sparse": horovod_sparse.__version__, "digest": self.digest}
        path = folder / NAME
        path.write_text(json.dumps({**about, **asdict(self)}, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in a folder.

        Nothing in it is trusted: it is no longer than the files beside it allow, and every number is checked before it
        is used.

        Raises:
            CheckpointError: It is missing, damaged, a symbolic link, or of another version.
        """
        path = folder / NAME
        with _open(path) as file:
            content = file.read(_HEAD_BYTES + _ENTRY_BYTES * len(list(folder.iterdir())))
        try:
            return cls._parse(json.loads(content, parse_constant=_refuse))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r})") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from error

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        written_in = _whole(content, "format")
        if written_in != _FORMAT:
            raise CheckpointError(
                f"has format {written_in}, which horovod_sparse {content['horovod_sparse']!s:.20} has written, but "
                f"this version reads format {_FORMAT}: load it with that version"
            )
        ranks, files = _whole(content, "ranks", least=1), content["files"]
        # Before names are made: as many as there are files, whose number the length of the manifest limits.
        if type(files) is not dict or ranks != len(files) - 1 or files.keys() != {SHARED, *map(shard, range(ranks))}:
            raise ValueError(f"it lists {list(files)!s:.200} for {ranks} ranks")
        entries = {name: Entry(_whole(one, "bytes"), _sha256(one, "sha256")) for name, one in files.items()}
        manifest = cls(_whole(content, "step"), _whole(content, "number"), ranks, entries)
        if _sha256(content, "digest") != manifest.digest:
            raise ValueError("its digest is not that of its content")
        return manifest

    @contextmanager
    def opened(self, folder: Path, name: str) -> Iterator[IO[bytes]]:
        """A file of the checkpoint, open for reading, after making sure that it is the one that was saved.

        Raises:
            CheckpointError: It is missing, truncated, damaged, a symbolic link, or of another save.
        """
        with self._fitting(folder, name) as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            if digest.hexdigest() != self.files[name].sha256:
                raise CheckpointError(
                    f"{folder / name} is not what was saved (its SHA-256 differs): it is damaged or mixed up"
                )
            file.seek(0)
            yield file

    @contextmanager
    def _fitting(self, folder: Path, name: str) -> Iterator[IO[bytes]]:
        """A file that has the length it should have."""
        path, expected = folder / name, self.files[name].bytes
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise CheckpointError(
                    f"{path} has {size} bytes, but {expected} were saved: it is truncated or mixed up"
                )
            yield file

    def verify(self, folder: Path, content: bool = True) -> None:
        """Makes sure that all files are those that were saved; CheckpointError names one that is not.

        Args:
            folder: That they are in.
            content: Whether to read them; otherwise it is enough that they have the right length.
        """
        for name in self.files:
            with self.opened(folder, name) if content else self._fitting(folder, name):
                pass


def _open(path: Path) -> IO[bytes]:
    """Opens a regular file: a link might lead out of the checkpoint, and a pipe has no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; all nodes must see the same folder, on a shared file system"
        ) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link: put the file itself in its place") from error
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def _whole(content: dict[str, Any], name: str, least: int = 0) -> int:
    value = content[name]
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number of at least {least}")
    return value


def _sha256(content: dict[str, Any], name: str) -> str:
    value = content[name]
    if type(value) is not str or len(value) != 64 or not _HEXADECIMAL.issuperset(value):
        raise ValueError(f"{name} is {value!r:.40}, not a SHA-256 in hexadecimal digits")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of a manifest")

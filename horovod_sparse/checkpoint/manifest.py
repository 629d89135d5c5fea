"""Manifest of a checkpoint: the list of its files, which shows whether it is complete."""

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

NAME = "manifest.json"
SHARED = "shared.pt"
_FORMAT = 3
_MOST = 2**63 - 1  # maximum of any number in a manifest
_HEAD_BYTES, _ENTRY_BYTES = 4096, 512  # maximum size of a manifest: fixed, and per file in its folder
_HEXADECIMAL = frozenset("0123456789abcdef")


class CheckpointError(RuntimeError):
    """Failure to save or load a checkpoint; the message names rank, path, cause and remedy.

    Attributes:
        damaged: Whether the checkpoint to load is damaged.
        intact: Step of an intact checkpoint to load instead of a damaged one; None if there is none.
        system: Whether reading or writing failed on a rank, so that nothing is known about the content.
    """

    def __init__(self, message: str, intact: int | None = None, damaged: bool = False, system: bool = False) -> None:
        super().__init__(message)
        self.intact, self.damaged, self.system = intact, damaged, system


def shard(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True)
class Entry:
    """Length of a file in bytes, and SHA-256 of its content in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """List of everything that belongs to a complete checkpoint.

    Attributes:
        step: Step number.
        number: Number of the save; the newest checkpoint has the highest one, whatever its step.
        ranks: Number of ranks that saved the checkpoint.
        files: Length and digest of each file, by name.
    """

    step: int
    number: int
    ranks: int
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's fields, and thereby of the content of all files, in hexadecimal digits."""
        content = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def write(self, folder: Path) -> Path:
        """Write the manifest into a folder, and return its path."""
        about = {"format": _FORMAT, "horovod_sparse": horovod_sparse.__version__, "digest": self.digest}
        path = folder / NAME
        path.write_text(json.dumps({**about, **asdict(self)}, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path, entries: int = 0) -> Manifest:
        """Return the manifest in a folder.

        The content is not trusted: the number of files in the folder, or ``entries``, limits how much is read, and
        every number is checked before use.

        Raises:
            CheckpointError: The manifest is missing, damaged, a symbolic link, or of another format version.
            OSError: It cannot be read.
        """
        path = folder / NAME
        with naming(path), _open(path) as file:
            content = file.read(_HEAD_BYTES + _ENTRY_BYTES * max(entries, len(list(folder.iterdir()))))
        try:
            return cls._parse(json.loads(content, parse_constant=_refuse))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r})") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from error

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        written_in = _integer(content, "format")
        if written_in != _FORMAT:
            raise CheckpointError(
                f"has format {written_in}, written by horovod_sparse {content['horovod_sparse']!s:.20}, but "
                f"this version reads format {_FORMAT}: load it with the version that wrote it"
            )
        ranks, files = _integer(content, "ranks", least=1), content["files"]
        # Compare the numbers before building names: the length of the manifest limits `files`, but not `ranks`.
        if type(files) is not dict or ranks != len(files) - 1 or files.keys() != {SHARED, *map(shard, range(ranks))}:
            raise ValueError(f"the files are {list(files)!s:.200}, for {ranks} ranks")
        entries = {name: Entry(_integer(entry, "bytes"), _sha256(entry, "sha256")) for name, entry in files.items()}
        manifest = cls(_integer(content, "step"), _integer(content, "number"), ranks, entries)
        if _sha256(content, "digest") != manifest.digest:
            raise ValueError("the digest does not match the content")
        return manifest

    @contextmanager
    def opened(self, folder: Path, name: str) -> Iterator[IO[bytes]]:
        """Open a file of the checkpoint for reading, after verifying that it is what was saved.

        Raises:
            CheckpointError: The file is missing, truncated, damaged, a symbolic link, or of another save.
            OSError: It cannot be read.
        """
        with self.fitting(folder, name) as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            if digest.hexdigest() != self.files[name].sha256:
                raise CheckpointError(
                    f"{folder / name} is not what was saved (its SHA-256 differs): it is damaged or of another save"
                )
            file.seek(0)
            yield file

    @contextmanager
    def fitting(self, folder: Path, name: str) -> Iterator[IO[bytes]]:
        """Open a file of the checkpoint after verifying its length."""
        path, expected = folder / name, self.files[name].bytes
        with naming(path), _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise CheckpointError(
                    f"{path} has {size} bytes, but {expected} were saved: it is truncated or of another save"
                )
            yield file

    def verify(self, folder: Path, content: bool = True) -> None:
        """Verify that all files are what was saved; raise an error like ``opened`` for the first one that is not.

        Without ``content``, only their lengths are checked, not their digests.
        """
        for name in self.files:
            with self.opened(folder, name) if content else self.fitting(folder, name):
                pass


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the path in an OSError that names none, such as one of ``read`` or ``fsync``."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _open(path: Path) -> IO[bytes]:
    """Open a regular file. A link might lead out of the checkpoint, and a pipe has no end: both are refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; all nodes must see the same folder, on a shared file system"
        ) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link: put the file itself in its place") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _integer(content: dict[str, Any], name: str, least: int = 0) -> int:
    value = content[name]
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{name} is {value!r:.40}, not an integer of at least {least}")
    return value


def _sha256(content: dict[str, Any], name: str) -> str:
    value = content[name]
    if type(value) is not str or len(value) != 64 or not _HEXADECIMAL.issuperset(value):
        raise ValueError(f"{name} is {value!r:.40}, not a SHA-256 in hexadecimal digits")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed in a manifest")

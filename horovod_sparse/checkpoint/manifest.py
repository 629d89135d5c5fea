"""The list of a checkpoint's files, by which it is known to be whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod_sparse
from horovod_sparse.checkpoint.together import CheckpointError

NAME = "manifest.json"
SHARED = "shared.pt"
_FORMAT = 1


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

    def write(self, folder: Path) -> Path:
        """Writes the manifest into a folder; gives its path."""
        content = {"format": _FORMAT, "horovod_sparse": horovod_sparse.__version__, **asdict(self)}
        path = folder / NAME
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in a folder.

        Raises:
            CheckpointError: It is missing, damaged, or of a newer version.
        """
        path = folder / NAME
        try:
            content = json.loads(path.read_bytes())
            written_by = content["format"], content["horovod_sparse"]
            manifest = cls._parse(content) if content["format"] == _FORMAT else None
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r})") from error
        if manifest is None:
            raise CheckpointError(
                f"{path} has format {written_by[0]}, which horovod_sparse {written_by[1]} has written, but this "
                f"version reads format {_FORMAT}: load it with that version"
            )
        return manifest

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        files = {name: Entry(int(one["bytes"]), str(one["sha256"])) for name, one in content["files"].items()}
        manifest = cls(int(content["step"]), int(content["number"]), int(content["ranks"]), files)
        expected = {SHARED, *map(shard, range(manifest.ranks))}
        if manifest.ranks < 1 or set(files) != expected:
            raise ValueError(f"it lists {sorted(files)} for {manifest.ranks} ranks")
        return manifest

    def verify(self, folder: Path, name: str) -> None:
        """Makes sure that a file is the one that was saved.

        Raises:
            CheckpointError: It is missing, truncated, damaged, or of another save.
        """
        path, entry = folder / name, self.files[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; all nodes must see the same folder, on a shared file system")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size} bytes, but {entry.bytes} were saved: it is truncated or mixed up")
        if _sha256(path) != entry.sha256:
            raise CheckpointError(f"{path} is not what was saved (its SHA-256 differs): it is damaged or mixed up")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

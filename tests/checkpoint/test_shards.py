"""A checkpoint's files reach the disk when they are written, and loading one executes no code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod_sparse.checkpoint import CheckpointError
from horovod_sparse.checkpoint.manifest import SHARED, Manifest, shard
from horovod_sparse.checkpoint.shards import read_own, write

OWN = {"compression": None, "generators": {}, "buffers": {}, "data": {}}


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def saved(folder, content):
    entry = write(folder, shard(0), content)
    return Manifest(1, 1, 1, {shard(0): entry, SHARED: entry})


def test_what_was_written_is_read(tmp_path):
    assert read_own(saved(tmp_path, OWN), tmp_path, 0) == OWN


def test_loading_executes_no_code(tmp_path):
    manifest = saved(tmp_path, {**OWN, "data": {"code": Code(tmp_path / "executed")}})
    with pytest.raises(CheckpointError, match=f"{shard(0)} cannot be read"):
        read_own(manifest, tmp_path, 0)
    assert not (tmp_path / "executed").exists()


def test_a_file_is_on_the_disk_when_it_has_been_written(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    entry = write(tmp_path, shard(0), OWN)
    assert synced == [(str(tmp_path / shard(0)), entry.bytes)]

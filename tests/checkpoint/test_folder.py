"""Only folders with the final name of a checkpoint count; everything else in the folder is ignored."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horovod_sparse.checkpoint import CheckpointError
from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import Manifest
from horovod_sparse.checkpoint.shards import write


def save(folder, step):
    folder.prepare()
    partial = folder.partial(step, "0123abcd")
    files = {name: write(partial, name, {}) for name in ("shared.pt", "rank-00000.pt")}
    manifest = Manifest(step, folder.last_number + 1, 1, files)
    folder.complete(partial, manifest, files)
    return manifest


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 10)
    save(folder, 20)
    return folder


def test_a_checkpoint_is_renamed_after_everything_is_on_disk(folder, monkeypatch, caplog):
    calls, sizes, fsync, rename = [], {}, os.fsync, Path.rename

    def noted_fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append(("fsync", str(path)))
        sizes[path.name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def noted_rename(path, target):
        calls.append(("rename", str(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    save(folder, 30)
    partial = folder.partial(30, "0123abcd")
    assert calls == [
        *(("fsync", f"{partial}/{name}") for name in ("shared.pt", "rank-00000.pt", "manifest.json")),
        ("fsync", str(partial)),
        ("rename", str(folder.of(30))),
        ("fsync", str(folder.path)),
    ]
    assert all(sizes[path.name] == path.stat().st_size for path in folder.of(30).iterdir())
    assert not caplog.records


STRAY = [
    *("step-00000099.replaced", "step-00000099.partial", "step-00000099.partial-0123abcd", "step-٠٠٠٠٠٠٩٩"),
    *("step-000000099", "step-99", "step-00000099.replaced.partial", "step-", "step--0000099", "steps-00000099"),
]


def test_a_leftover_that_cannot_be_deleted_stops_no_save(folder, monkeypatch, caplog):
    leftover = folder.partial(30, "89abcdef")
    leftover.mkdir()

    def refuse(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    monkeypatch.setattr("horovod_sparse.checkpoint.folder._remove", refuse)
    save(folder, 30)
    assert folder.steps() == [10, 20, 30]
    assert f"{leftover} could not be deleted" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_stray_names_are_ignored(folder, kind, tmp_path):
    strays = [folder.path / name for name in STRAY]
    for stray in strays:
        if kind == "folder":
            stray.mkdir()
        elif kind == "file":
            stray.write_text("")
        else:
            stray.symlink_to(tmp_path)
    assert folder.choose(None).step == 20
    assert [manifest.step for manifest in folder.checkpoints()] == [20, 10]
    save(folder, 30)
    assert folder.choose(None).step == 30
    for stray in strays:
        cleaned = ".partial" in stray.name or ".replaced" in stray.name
        assert (stray.exists() or stray.is_symlink()) != cleaned
    assert folder.of(10).is_dir(), "what a link leads to is not deleted"


def test_an_interrupted_replacement_of_a_checkpoint_is_read_and_restored(folder):
    replaced = folder.path / "step-00000020.replaced"
    folder.of(20).rename(replaced)
    folder.path.chmod(0o555)  # reading changes nothing
    assert folder.choose(None).step == 20
    assert folder.choose(20).step == 20
    assert folder.intact(besides=None).step == 20
    folder.path.chmod(0o755)
    folder.prepare()
    assert folder.of(20).is_dir()
    assert not replaced.exists()


@pytest.fixture
def unreadable(monkeypatch):
    """Return a function that makes a file or folder unreadable, until it is called with None."""
    broken, opened, scanned = [None], os.open, os.scandir

    def failing(function):
        def attempt(path, *arguments, **settings):
            if str(path) == str(broken[0]):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return function(path, *arguments, **settings)

        return attempt

    monkeypatch.setattr(os, "open", failing(opened))
    monkeypatch.setattr(os, "scandir", failing(scanned))
    return lambda path: broken.__setitem__(0, path)


def test_a_checkpoint_that_cannot_be_read_is_not_passed_over(folder, unreadable):
    manifest, shard = folder.of(20) / "manifest.json", folder.of(10) / "rank-00000.pt"
    for path, attempt in {
        manifest: lambda: folder.choose(None),
        shard: lambda: folder.intact(besides=20),
        folder.path: lambda: folder.choose(None),
    }.items():
        unreadable(path)
        with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
            attempt()


def test_an_interrupted_replacement_that_cannot_be_read_is_not_deleted(folder, unreadable):
    replaced = folder.path / "step-00000020.replaced"
    folder.of(20).rename(replaced)
    unreadable(replaced / "manifest.json")
    with pytest.raises(OSError, match="Input/output error"):
        folder.prepare()
    unreadable(None)
    assert folder.choose(None).step == 20


def test_a_save_after_one_that_cannot_be_read_counts_as_newer(folder, unreadable, caplog):
    unreadable(folder.of(20) / "manifest.json")
    with pytest.raises(OSError, match="Input/output error"):
        _ = Folder(folder.path).last_number
    save(folder, 15)
    folder.prune(1)
    assert "no older checkpoints are deleted" in caplog.text
    unreadable(None)
    assert [manifest.step for manifest in folder.checkpoints()] == [15, 20, 10]


def test_symbolic_links_to_and_inside_a_checkpoint_are_refused(folder, tmp_path):
    shard = folder.of(20) / "rank-00000.pt"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{shard} is a symbolic link: put the file itself in its place"):
        folder.manifest(20).verify(folder.of(20))
    assert folder.intact(besides=None).step == 10
    folder.of(30).symlink_to(folder.of(10))
    with pytest.raises(CheckpointError, match=f"{folder.of(30)} is a symbolic link: put the folder itself"):
        folder.choose(None)
    save(folder, 30)
    assert folder.choose(None).step == 30
    assert folder.choose(10).step == 10

"""The command lists the checkpoints of a folder, and deletes only old ones and leftovers."""

from __future__ import annotations

import os
import shutil

import launch
import pytest

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import Manifest
from horovod_sparse.checkpoint.shards import write
from horovod_sparse.cli import main


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints, of which that of step 10 was saved last."""
    folder = Folder(tmp_path)
    for step in (20, 30, 10):
        contents = {"shared.pt": b"s" * 2**20, "rank-00000.pt": b"first", "rank-00001.pt": str(step).encode()}
        partial = folder.partial(step, "0123abcd")
        files = {name: write(partial, name, {"content": content}) for name, content in contents.items()}
        folder.complete(partial, Manifest(step, folder.last_number + 1, 2, files), files)
    return folder


def table(capsys, *arguments):
    status = main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    return status, [line.split(maxsplit=4) for line in output.out.splitlines()[1:]], output.err


@pytest.mark.parametrize(("arguments", "state"), [([], "complete"), (["--verify"], "verified")])
def test_all_are_listed_newest_first(folder, capsys, arguments, state):
    status, rows, _ = table(capsys, folder.path, *arguments)
    expected = [[str(step), "1.0", "2", folder.manifest(step).digest, state] for step in (10, 30, 20)]
    assert (status, rows) == (0, expected)
    assert not (folder.path / "lock").exists(), "reading changes nothing"


def test_a_damaged_checkpoint_is_named(folder, capsys):
    shutil.copy(folder.of(10) / "rank-00001.pt", folder.of(20))
    (folder.of(30) / "shared.pt").unlink()
    (folder.of(10) / "manifest.json").write_text("{")
    status, rows, _ = table(capsys, folder.path)
    assert status == 1
    assert [row[0] for row in rows] == ["30", "20", "10"]
    assert rows[0][4].startswith(f"{folder.of(30)}/shared.pt is missing")
    assert rows[1][4] == "complete"
    status, rows, _ = table(capsys, folder.path, "--verify")
    assert status == 1
    assert "rank-00001.pt is not what was saved (its SHA-256 differs)" in rows[1][4]


def test_old_checkpoints_and_leftovers_are_deleted(folder, capsys):
    (folder.path / "step-00000040.partial-89abcdef").mkdir()
    status = main(["checkpoint", str(folder.path), "--prune", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert (status, lines[:2]) == (0, ["deleted step 30", "deleted step 20"])
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "step-00000010"]


def test_nothing_is_deleted_while_a_job_holds_the_lock(folder):
    folder.prepare()
    program = "import sys; from horovod_sparse.cli import main; sys.exit(main(sys.argv[1:]))"
    result = launch.python("-c", program, "checkpoint", str(folder.path), "--prune", "1")
    assert result.returncode == 1
    assert f"another job saves to {folder.path} (process {os.getpid()} on " in result.stderr
    assert folder.steps() == [10, 20, 30]


def test_a_missing_folder_is_named(tmp_path, capsys):
    status, rows, error = table(capsys, tmp_path / "none")
    assert (status, rows) == (1, [])
    assert f"{tmp_path / 'none'} is not a folder" in error


def test_the_command_imports_neither_torch_nor_mpi(folder):
    without = "import sys; sys.modules.update(dict.fromkeys(('torch', 'mpi4py', 'numpy')))"
    command = "from horovod_sparse.cli import main; sys.exit(main(sys.argv[1:]))"
    result = launch.python("-c", f"{without}; {command}", "checkpoint", str(folder.path), "--verify")
    assert result.returncode == 0, result.stderr

"""One job at a time saves in a folder; the lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import time
from unittest.mock import Mock

import pytest

from horovod_sparse.checkpoint import CheckpointError, lock


def test_the_lock_names_the_process_that_holds_it_until_that_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    other = fork.Process(target=lambda: (lock.hold(tmp_path), held.set(), time.sleep(60)), daemon=True)
    other.start()
    assert held.wait(60)
    with pytest.raises(
        CheckpointError, match=rf"another job saves to {tmp_path} \(process {other.pid} on .*, job 4711"
    ):
        lock.hold(tmp_path)
    other.kill()
    other.join()
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()


def test_a_child_process_does_not_inherit_the_lock(tmp_path):
    lock.hold(tmp_path)
    child = os.fork()
    if child == 0:
        status = 1
        with (tmp_path / "lock").open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_recreated_folder_can_be_locked(tmp_path):
    folder = tmp_path / "folder"
    for _ in range(2):
        folder.mkdir()
        lock.hold(folder)
        assert f"process {os.getpid()} " in (folder / "lock").read_text()
        shutil.rmtree(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_warns_once_if_the_file_system_has_no_locks(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(number, os.strerror(number))))
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    (record,) = caplog.records
    assert f"not support locks ({os.strerror(number)}): make sure that no other job saves" in record.message


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock.hold(tmp_path)
    assert not (tmp_path / "elsewhere").exists()

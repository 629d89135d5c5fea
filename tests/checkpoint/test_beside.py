"""A background save holds the state of the step in which it was requested."""

from __future__ import annotations

import logging
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from checkpointing import Training, refusal, reseed
from laws import everywhere
from states import same

from horovod_sparse.checkpoint import Checkpoints, store

pytestmark = pytest.mark.mpi


@pytest.fixture
def held(monkeypatch):
    """Lets saves wait before they write, until this event is set."""
    write, event = store.write, threading.Event()

    def patiently(*arguments):
        assert event.wait(60)
        return write(*arguments)

    monkeypatch.setattr(store, "write", patiently)
    yield event
    event.set()


def steps(folder):
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    "compression",
    [
        "oktopk:density=0.05,tau_threshold=3,tau_partition=2",
        "gravac:density=0.2,window=2,cf_max=1e6",
        "topka:density=0.05",
    ],
)
def test_a_background_save_is_not_affected_by_later_steps(hvd, comm, folder, held, compression):
    checkpoints, rank, settings = Checkpoints(folder), comm.Get_rank(), {"momentum": 0.9}
    run = Training(compression, rank, **settings).train(2)
    for step in (2, 4):  # the second time in the memory of the first
        checkpoints.async_save(step, **run.states, data={"losses": run.losses})
        run.train(2)
        held.set()
        assert everywhere(comm, len(checkpoints.wait()) == 64)
        held.clear()
    run.train(1)
    held.set()
    resumed = Training(compression, rank, **settings)
    reseed(99)
    resumed.losses = checkpoints.load(step=4, **resumed.states).data["losses"]
    if "gravac" in compression:  # which measures times
        assert everywhere(comm, len(resumed.losses) == 4)
    else:
        assert everywhere(comm, same(run.bits(), resumed.train(3).bits()))


def test_background_and_blocking_saves_are_identical(hvd, comm, checkpoints, folder):
    run = Training("topka:density=0.05", comm.Get_rank(), momentum=0.9).train(2)
    checkpoints.async_save(1, **run.states)
    beside = checkpoints.wait()
    checkpoints.save(2, **run.states)
    for file in ("shared.pt", f"rank-{comm.Get_rank():05d}.pt"):
        first, second = (torch.load(folder / step / file, weights_only=True) for step in steps(folder))
        assert everywhere(comm, same(first, second))
    assert everywhere(comm, checkpoints.load(step=1, digest=beside, **run.states).notes == ())
    assert checkpoints.wait() is None


def test_a_second_save_waits_for_the_first(comm, run, checkpoints, folder, held):
    for step, follow in enumerate((checkpoints.async_save, checkpoints.save)):
        held.clear()
        checkpoints.async_save(2 * step, **run.states)
        assert everywhere(comm, f"step-{2 * step:08d}" not in steps(folder))
        comm.Barrier()
        threading.Timer(0.2, held.set).start()
        follow(2 * step + 1, **run.states)
        checkpoints.wait()
        assert everywhere(comm, f"step-{2 * step:08d}" in steps(folder))
    held.clear()
    checkpoints.async_save(7, **run.states)
    threading.Timer(0.2, held.set).start()
    assert everywhere(comm, checkpoints.load(**run.states).step == 7)


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_save_after_an_interrupted_wait_still_waits(comm, run, checkpoints, folder, held, monkeypatch, save):
    checkpoints.async_save(1, **run.states)
    with monkeypatch.context() as patched:
        interrupt = Mock(side_effect=KeyboardInterrupt)
        patched.setattr("concurrent.futures.Future.result", interrupt)
        patched.setattr("concurrent.futures.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
    assert everywhere(comm, checkpoints.in_progress)
    threading.Timer(0.2, held.set).start()
    getattr(checkpoints, save)(2, **run.states)
    checkpoints.wait()
    assert everywhere(comm, steps(folder) == ["step-00000001", "step-00000002"])


def test_two_objects_do_not_save_to_one_folder_at_the_same_time(comm, run, checkpoints, folder, held):
    other = Checkpoints(folder)
    checkpoints.async_save(1, **run.states)
    while comm.Get_rank() == 0 and not checkpoints._folder.saving:
        time.sleep(0.01)
    message = refusal(comm, lambda: other.save(2, **run.states))
    assert f"rank 0: another Checkpoints object of this process saves to {folder}, too" in message
    assert "wait() for the last save of one before you use the next" in message
    held.set()
    checkpoints.wait()
    assert everywhere(comm, steps(folder) == ["step-00000001"])
    other.save(2, **run.states)
    message = refusal(comm, lambda: checkpoints.save(2, **run.states))
    assert f"another Checkpoints object of this process saves to {folder}, too" in message
    assert everywhere(comm, steps(folder) == ["step-00000001", "step-00000002"])


def test_a_failed_background_save_is_logged_and_raised_by_the_next_call_which_still_saves(
    comm, run, checkpoints, folder, monkeypatch, caplog
):
    last = comm.Get_size() - 1
    with monkeypatch.context() as patched:
        if comm.Get_rank() == last:
            patched.setattr(store, "write", Mock(side_effect=OSError("no space")))
        checkpoints.async_save(1, **run.states)
        message = f"step 1 could not be saved: rank {last}: no space"
        assert refusal(comm, checkpoints.wait) == message
        said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert everywhere(comm, said == [message] * (comm.Get_rank() == 0))
        checkpoints.async_save(2, **run.states)
        checkpoints._under_way.exception()  # has failed before the disk has room again
    comm.Barrier()
    assert "step 2 could not be saved" in refusal(comm, lambda: checkpoints.save(3, **run.states))
    assert everywhere(comm, steps(folder) == ["step-00000003"])
    assert checkpoints.wait() is None

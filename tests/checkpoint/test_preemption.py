"""A signal to any rank is noticed by all ranks in the same step."""

from __future__ import annotations

import os
import signal

import pytest
from laws import everywhere

from horovod_sparse.checkpoint import on_preemption, store

pytestmark = pytest.mark.mpi

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_all_ranks_notice_at_the_same_step_and_signal_handlers_are_restored(hvd, comm, number):
    before = [signal.getsignal(one) for one in SIGNALS]
    with on_preemption() as preempted:
        steps = 0
        while not preempted():
            steps += 1
            if steps == 3 and comm.Get_rank() == comm.Get_size() - 1:
                os.kill(os.getpid(), number)
        assert everywhere(comm, steps == 3)
        assert everywhere(comm, preempted())
    assert everywhere(comm, [signal.getsignal(one) for one in SIGNALS] == before)
    with on_preemption() as preempted:
        assert everywhere(comm, not preempted())
    with pytest.raises(KeyError), on_preemption():
        raise KeyError
    assert everywhere(comm, [signal.getsignal(one) for one in SIGNALS] == before)


def test_a_save_in_progress_is_completed_after_the_signal(comm, run, checkpoints, monkeypatch):
    write = store.write

    def signalled(*arguments):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        return write(*arguments)

    with on_preemption() as preempted:
        monkeypatch.setattr(store, "write", signalled)
        checkpoints.save(1, **run.states)
        assert everywhere(comm, preempted())
    assert everywhere(comm, checkpoints.load(**run.states).step == 1)

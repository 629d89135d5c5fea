"""From a process set to a transport in Horovod's order."""

from __future__ import annotations

from pathlib import Path

import launch
import numpy as np
import pytest
from laws import everywhere
from mpi4py import MPI

from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import transport_of

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "split_world.py"


@pytest.mark.full
def test_horovod_on_a_part_of_the_mpi_job_in_another_order():
    result = launch.python(str(PROGRAM), ranks=4)
    assert result.returncode == 0, result.stderr
    for rank, (of_horovod, moved) in enumerate([(1, -1), (1, -2), (0, -1), (0, -2)]):
        assert f"[{rank} of 4 is {of_horovod} of 2 and moved by {moved}]" in result.stdout


@pytest.mark.mpi
def test_two_communicators_of_the_world_do_not_meet_each_others_messages(hvd, comm):
    first, second = transport_of(), transport_of()
    assert everywhere(comm, (first.rank, first.size) == (hvd.rank(), hvd.size()))
    request = first.comm.isend("first", dest=first.rank, tag=1)
    assert not second.comm.iprobe(source=second.rank, tag=1)
    assert first.comm.recv(source=first.rank, tag=1) == "first"
    request.wait()


@pytest.mark.mpi
def test_no_message_meets_a_receive_of_the_program(hvd, comm, monkeypatch):
    """One for any message, from any rank, of the world: it would take what communicators are made with."""
    monkeypatch.setattr(process, "world", None)  # as in a program that begins
    text, world = np.zeros(64, np.uint8), MPI.COMM_WORLD
    request = world.Irecv([text, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)
    made = [transport_of(), transport_of(world)]
    if comm.Get_size() > 1:
        process_set = hvd.add_process_set(list(range(1, comm.Get_size())))
        made.append(transport_of(process_set))
        comm.Barrier()
        hvd.remove_process_set(process_set)
    made.append(transport_of())
    assert everywhere(comm, all(one is None or one.allreduce(np.ones(1, np.int64))[0] == one.size for one in made))
    assert everywhere(comm, not request.Test())
    world.Send([b"mine", MPI.BYTE], hvd.rank(), 7)
    request.Wait()
    assert everywhere(comm, bytes(text[:4]) == b"mine")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("mpi_built", "built without MPI.*HOROVOD_WITH_MPI=1"),
        ("mpi_enabled", "Gloo.*horovodrun --mpi"),
        ("mpi_threads_supported", "MPI_THREAD_MULTIPLE"),
    ],
)
def test_a_horovod_without_what_is_needed(hvd, comm, monkeypatch, lacks, message):
    monkeypatch.setattr(hvd, lacks, lambda: False)
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*{message}"):
        transport_of()

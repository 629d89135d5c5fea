"""From a process set to a communicator in Horovod's order."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
from laws import everywhere

from horovod_sparse.training.communicator import communicator

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "split_world.py"


@pytest.mark.full
def test_horovod_on_a_part_of_the_mpi_job_in_another_order():
    result = launch.python(str(PROGRAM), ranks=4)
    assert result.returncode == 0, result.stderr
    for rank, (of_horovod, moved) in enumerate([(1, -1), (1, -2), (0, -1), (0, -2)]):
        assert f"[{rank} of 4 is {of_horovod} of 2 and moved by {moved}]" in result.stdout


@pytest.mark.mpi
def test_two_communicators_of_the_world_do_not_meet_each_others_messages(hvd, comm):
    first, second = communicator(), communicator()
    assert everywhere(comm, (first.Get_rank(), first.Get_size()) == (hvd.rank(), hvd.size()))
    request = first.isend("first", dest=first.Get_rank(), tag=1)
    assert not second.iprobe(source=second.Get_rank(), tag=1)
    assert first.recv(source=first.Get_rank(), tag=1) == "first"
    request.wait()


@pytest.mark.mpi
def test_a_process_set(hvd, comm):
    ranks = comm.Get_size()
    if ranks == 1:
        return
    chosen = list(range(1, ranks))
    process_set = hvd.add_process_set(chosen)
    ours = communicator(process_set)
    if hvd.rank() == 0:
        assert ours is None
    else:
        assert (ours.Get_rank(), ours.Get_size()) == (process_set.rank(), ranks - 1)
        assert ours.allgather(hvd.rank()) == chosen
    comm.Barrier()
    hvd.remove_process_set(process_set)


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
        communicator()

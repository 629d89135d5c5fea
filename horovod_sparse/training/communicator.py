"""From a Horovod process set to an MPI communicator of our own."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from mpi4py import MPI

# Create_group needs a tag of its own, apart from other libraries' groups.
_TAG = 7211


def communicator(process_set: Any = hvd.global_process_set) -> MPI.Intracomm | None:
    """A new communicator of the ranks of a process set, in Horovod's rank order.

    A collective call of the process set. Each optimizer needs a communicator of its own: two that exchange at the
    same time must not meet each other's messages.

    Args:
        process_set: Horovod process set; by default all ranks.

    Returns:
        The communicator, or None on a rank that the process set does not include.

    Raises:
        ValueError: The process set is not registered with Horovod.
        RuntimeError: Horovod or MPI cannot do what is needed; the message names the remedy.
    """
    _require_mpi()
    if process_set.process_set_id is None:
        raise ValueError(f"rank {hvd.rank()}: {process_set} is not registered: pass it to hvd.add_process_set() first")
    if not process_set.included():
        return None
    if process_set.size() == 1:
        return MPI.COMM_SELF.Dup()
    mine = torch.tensor([MPI.COMM_WORLD.Get_rank()])
    name = f"horovod_sparse.world_ranks.{process_set.process_set_id}"
    ranks = hvd.allgather(mine, name=name, process_set=process_set).tolist()
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks), tag=_TAG)


def _require_mpi() -> None:
    rank, level = hvd.rank(), MPI.Query_thread()
    if not hvd.mpi_built():
        raise RuntimeError(
            f"rank {rank}: this Horovod was built without MPI, which horovod_sparse exchanges over: rebuild it with "
            "HOROVOD_WITH_MPI=1 (tools/install_horovod.py does); `horovod-sparse check` shows what is there"
        )
    if not hvd.mpi_enabled():
        raise RuntimeError(
            f"rank {rank}: Horovod runs over Gloo here, but horovod_sparse exchanges over MPI: start the program with "
            "horovodrun --mpi, mpirun or srun --mpi=pmix"
        )
    if level != MPI.THREAD_MULTIPLE or not hvd.mpi_threads_supported():
        raise RuntimeError(
            f"rank {rank}: MPI gives thread level {level}, but Horovod and horovod_sparse communicate from threads of "
            f"their own and need MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}): import mpi4py or call hvd.init() before "
            "anything else starts MPI, unset HOROVOD_MPI_THREADS_DISABLE, and use an MPI built with threads"
        )

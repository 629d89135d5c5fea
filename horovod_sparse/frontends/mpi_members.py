"""Private transports over MPI, for ranks that Horovod, torch or MPI groups."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.watch import Call
from horovod_sparse.transport.mpi import MPITransport, job, require_launcher

# Tag for Create_group; differs from those of other libraries.
_TAG = 7211
_CALL = "creation of a communicator"


def transport_of(members: Any) -> MPITransport | None:
    """Return a new transport, as ``members.transport_of``; without members, of all ranks of Horovod or else of MPI."""
    require_launcher()
    require_threads()
    process.join(job())
    process.watch.start()
    with process.communicating(_CALL):
        if isinstance(members, distributed.ProcessGroup):
            return _of_process_group(members)
        if members is None:
            members = _horovods_ranks() or MPI.COMM_WORLD
        if members == MPI.COMM_WORLD:
            return _private_world().duplicate()
        if isinstance(members, MPI.Intracomm):
            transport = MPITransport(members)
            with process.communicating(_CALL, transport):
                return transport.duplicate()
        return _of_process_set(members)


def _horovods_ranks() -> Any:
    hvd = sys.modules.get("horovod.torch")
    return hvd.global_process_set if hvd is not None and hvd.is_initialized() else None


def _of_process_set(process_set: Any) -> MPITransport | None:
    import horovod.torch as hvd

    _require_mpi(hvd)
    _wrap(hvd)
    if process_set.process_set_id is None:
        raise ValueError(f"rank {hvd.rank()}: {process_set} is not registered: pass it to hvd.add_process_set() first")
    if not process_set.included():
        return None
    if process_set.size() == 1:
        return MPITransport(MPI.COMM_SELF.Dup())
    everybody = process_set.size() == job().size
    mine = torch.tensor([job().rank], dtype=torch.int64, device="cpu")
    name = f"horovod_sparse.world_ranks.{process_set.process_set_id}"
    with process.communicating(_CALL, _everybody() if everybody else None):
        return _group(hvd.allgather(mine, name=name, process_set=process_set).tolist())


def _of_process_group(group: distributed.ProcessGroup) -> MPITransport | None:
    if distributed.get_rank(group) < 0:
        return None
    ranks: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(ranks, job().rank, group=group)
    if len(set(ranks)) < len(ranks):
        raise RuntimeError(
            f"rank {distributed.get_rank(group)}: torch counts {len(ranks)} processes here, but MPI {len(set(ranks))}: "
            "call hvs.ddp.init_process_group(), and start the program with mpirun, srun --mpi=pmix or torchrun"
        )
    return _group(ranks)


def _group(ranks: Sequence[int]) -> MPITransport:
    """Return a transport of some ranks of the world; a collective call of these ranks only."""
    # Create_group sends messages on its parent communicator, which should be private. COMM_WORLD is the fallback: the
    # private world is created only when all ranks create something together.
    world = _private_world() if len(ranks) == job().size else process.world
    parent = world if isinstance(world, MPITransport) else _everybody()
    return MPITransport(parent.comm.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks), tag=_TAG), parent.waiting)


@functools.cache
def _everybody() -> MPITransport:
    """Return a transport of all ranks over COMM_WORLD, which belongs to the program; used only to duplicate it."""
    return MPITransport(MPI.COMM_WORLD)


def _private_world() -> MPITransport:
    """Return a transport of all ranks, separate from the program's own messages; the first call is collective."""
    if process.world is None:
        with process.communicating(_CALL, _everybody()):
            process.world = _everybody().duplicate()
        process.watch.start(process.world)
    assert isinstance(process.world, MPITransport)
    return process.world


def _wrap(hvd: Any) -> None:
    """Wrap two Horovod functions: leave the job before Horovod shuts down, and register waits in Horovod operations."""

    def closing(shut_down: Callable[[], Any]) -> Callable[[], Any]:
        def close_and_shut_down() -> Any:
            process.close()  # shutdown may call MPI_Finalize, which waits for the other ranks
            return shut_down()

        return close_and_shut_down

    def noticing(wait: Callable[[int], Any]) -> Callable[[int], Any]:
        def wait_for_horovod(handle: int) -> Any:
            # Horovod reports long waits itself. It does not notice ranks that leave while they still exchange a bucket.
            with process.waiting(Call("an operation of Horovod", everybody, stalls=False)):
                return wait(handle)

        return wait_for_horovod

    everybody = _everybody() if hvd.size() == job().size else None
    process.replace(hvd.mpi_ops._basics.MPI_LIB_CTYPES, "horovod_shutdown", closing)
    process.replace(hvd.mpi_ops.mpi_lib, "horovod_torch_wait_and_clear", noticing)


def _require_mpi(hvd: Any) -> None:
    rank = hvd.rank()
    if not hvd.mpi_built():
        raise RuntimeError(
            f"rank {rank}: this Horovod was built without MPI, which horovod_sparse needs: rebuild it with "
            "HOROVOD_WITH_MPI=1 (tools/install_horovod.py does); `horovod-sparse check` shows what is missing"
        )
    if not hvd.mpi_enabled():
        raise RuntimeError(
            f"rank {rank}: Horovod runs over Gloo here, but horovod_sparse needs MPI: start the program with "
            "horovodrun --mpi, mpirun or srun --mpi=pmix"
        )
    require_threads(hvd.mpi_threads_supported())


def require_threads(supported: bool = True) -> None:
    """Check that several threads may call MPI at the same time.

    Args:
        supported: Whether Horovod reports that MPI threads are supported.

    Raises:
        RuntimeError: MPI or Horovod does not support it.
    """
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE or not supported:
        raise RuntimeError(
            f"rank {job().rank}: MPI gives thread level {level}, but horovod_sparse and Horovod "
            f"communicate from background threads and need MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}): import "
            "mpi4py or call hvd.init() before anything else starts MPI, unset HOROVOD_MPI_THREADS_DISABLE, and use an "
            "MPI built with threads"
        )

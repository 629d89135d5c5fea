"""torch's default process group for ranks that mpirun or srun has started."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from horovod_sparse.frontends.members import require_threads


def init_process_group(backend: str | None = None, **settings: Any) -> None:
    """Initialize torch's default process group with all MPI ranks; a collective call.

    Start the script with mpirun or srun instead of torchrun. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, which scripts may read. The rendezvous is at rank 0's
    ``MASTER_ADDR``, by default its host name, and at a free port.

    Args:
        backend: Backend of the group, which carries everything that is not compressed: DDP's first broadcast and its
            buffers. None: nccl if every node has a GPU for each of its ranks, otherwise gloo.
        **settings: Further arguments of ``torch.distributed.init_process_group``, such as ``timeout``.

    Raises:
        RuntimeError: A launcher other than MPI's has started several processes, or MPI lacks ``MPI_THREAD_MULTIPLE``.
    """
    comm = MPI.COMM_WORLD
    _require_launcher(comm)
    require_threads()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, ranks, local_rank, local_ranks = comm.Get_rank(), comm.Get_size(), node.Get_rank(), node.Get_size()
    node.Free()
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    os.environ.update({name: str(value) for name, value in variables.items()})
    backend = backend or _backend(comm, local_ranks)
    store = _store(comm, one_node=local_ranks == ranks)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, **settings)


def _backend(comm: MPI.Intracomm, local_ranks: int) -> str:
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    return "nccl" if comm.allreduce(enough and distributed.is_nccl_available(), MPI.LAND) else "gloo"


def _store(comm: MPI.Intracomm, one_node: bool) -> TCPStore:
    """Return the store for the rendezvous of torch's processes; rank 0 serves it."""
    server, address = None, ("", 0)
    if comm.Get_rank() == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else socket.gethostname())
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = host, server.port
    host, port = comm.bcast(address)
    os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    return server or TCPStore(host, port, is_master=False)


def _require_launcher(comm: MPI.Intracomm) -> None:
    """Raise RuntimeError if this process was started as one of several, but MPI has a single rank."""
    if comm.Get_size() > 1:
        return
    for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        started = os.environ.get(variable, "")
        if started.isdigit() and int(started) > 1:
            raise RuntimeError(
                f"{variable}={started} says that several processes were started, but MPI knows only this one: start "
                "the program with mpirun, or with srun --mpi=pmix (`srun --mpi=list` shows the choices), not torchrun"
            )

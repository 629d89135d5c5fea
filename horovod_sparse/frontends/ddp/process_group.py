"""torch's default process group, made of MPI's ranks: mpirun and srun launch a script that uses it."""

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
    """Makes torch's default process group of all MPI ranks; a collective call.

    A script needs no launcher of torch then: mpirun or srun start it. ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
    ``LOCAL_WORLD_SIZE`` are set, as scripts read them. The processes meet at rank 0's host name, or at ``MASTER_ADDR``
    where that is set, and at a port that is free there.

    Args:
        backend: As for ``torch.distributed.init_process_group``. It carries what is not compressed: DDP's buffers and
            its first broadcast. By default nccl where every node has a GPU for each of its ranks, gloo elsewhere.
        **settings: More arguments of it, such as ``timeout``.

    Raises:
        RuntimeError: A launcher has started several processes, of which MPI does not know, or MPI has no threads.
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
    """The store at which torch's processes meet, on rank 0."""
    server, address = None, ("", 0)
    if comm.Get_rank() == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else socket.gethostname())
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = host, server.port
    host, port = comm.bcast(address)
    os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    return server or TCPStore(host, port, is_master=False)


def _require_launcher(comm: MPI.Intracomm) -> None:
    """Refuses to train alone where this process was started as one of several."""
    if comm.Get_size() > 1:
        return
    for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        started = os.environ.get(variable, "")
        if started.isdigit() and int(started) > 1:
            raise RuntimeError(
                f"{variable}={started} says that several processes were started, but MPI knows of this one only: start "
                "the program with mpirun, or with srun --mpi=pmix (`srun --mpi=list` shows what there is), not torchrun"
            )

"""torch's default process group for ranks that mpirun, srun or torchrun has started."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from horovod_sparse.frontends.members import mpi_members

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger("horovod_sparse")
# Seconds at the end of the program. A thread of Gloo that releases a tensor while Python is being finalized ends the
# process with SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
_RELEASE = 0.2


def init_process_group(backend: str | None = None, **settings: Any) -> None:
    """Initialize torch's default process group with all ranks; a collective call.

    Under torchrun, this is ``torch.distributed.init_process_group``. Otherwise the ranks are those of MPI. It then sets
    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, which scripts
    may read. The rendezvous is at rank 0's ``MASTER_ADDR``, by default its host name, and at a free port.

    Args:
        backend: Backend of the group, which carries everything that is not compressed: DDP's first broadcast and its
            buffers. None: gloo if ranks share GPUs, which NCCL refuses, with a warning; otherwise, as torch's default,
            gloo for the CPU, and nccl if each rank has a GPU.
        **settings: Further arguments of ``torch.distributed.init_process_group``, such as ``timeout``.

    Raises:
        RuntimeError: A launcher that neither MPI nor torch knows has started several processes, or MPI is missing or
            lacks ``MPI_THREAD_MULTIPLE``.
    """
    _wait_at_exit()
    if distributed.is_torchelastic_launched():
        distributed.init_process_group(backend or _backend_under_torchrun(), **settings)
        return
    over_mpi = mpi_members()
    comm: MPI.Intracomm = over_mpi.MPI.COMM_WORLD
    over_mpi.require_launcher()
    over_mpi.require_threads()
    node: Any = comm.Split_type(over_mpi.MPI.COMM_TYPE_SHARED)
    rank, ranks, local_rank, local_ranks = comm.Get_rank(), comm.Get_size(), node.Get_rank(), node.Get_size()
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    os.environ.update({name: str(value) for name, value in variables.items()})
    chosen = backend or _backend(comm, node)
    node.Free()
    store = _store(comm, one_node=local_ranks == ranks)
    distributed.init_process_group(chosen, store=store, rank=rank, world_size=ranks, **settings)


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(time.sleep, _RELEASE)


def _backend(comm: MPI.Intracomm, node: MPI.Intracomm) -> str:
    """Return nccl for GPUs, with gloo for the CPU, if each rank has its own GPU; otherwise gloo."""
    ranks = node.allgather(_gpu(node.Get_rank()))
    gpus = set(ranks) - {None}
    shared = _shared(len(ranks), len(gpus), comm.Get_rank(), node.Get_rank())
    everywhere = comm.allgather(bool(gpus) and not shared and distributed.is_nccl_available())
    return "cpu:gloo,cuda:nccl" if all(everywhere) else "gloo"


def _backend_under_torchrun() -> str | None:
    """Return gloo if ranks share GPUs, otherwise None, torch's default."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank, local_rank, local_ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return "gloo" if _shared(local_ranks, gpus, rank, local_rank) else None


def _shared(ranks: int, gpus: int, rank: int, local_rank: int) -> bool:
    """Return whether the ranks of this node share its GPUs; the node's first rank then warns."""
    shared = 0 < gpus < ranks
    if shared and local_rank == 0:
        _LOG.warning(
            "rank %d: the %d ranks of node %s have only %d GPU(s), so torch's process group uses Gloo, which is slow "
            "for what is not compressed: start one rank per GPU (torchrun --nproc-per-node=%d, srun "
            "--gpus-per-task=1), or pass backend='nccl' if each rank has a GPU that no other rank sees",
            rank,
            ranks,
            socket.gethostname(),
            gpus,
            gpus,
        )
    return shared


def _gpu(local_rank: int) -> str | None:
    """Return the identity of the GPU that a rank uses, by convention; None: it has none."""
    if not torch.cuda.is_available():
        return None
    # One task per GPU (`--gpus-per-task=1`) sees a single device, which differs from task to task.
    device = local_rank % torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", (visible, device)))  # without: torch < 2.4


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

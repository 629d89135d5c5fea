"""Private transports for the ranks that train together: over MPI, or over torch.distributed where MPI is not used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import distributed

from horovod_sparse.control.lifecycle import process
from horovod_sparse.transport import torch_job
from horovod_sparse.transport.base import Job, Transport
from horovod_sparse.transport.torch_distributed import TorchTransport

_CALL = "creation of connections"
# Measurements of each connection made so far, by the world ranks of its members.
_measured: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}


def transport_of(members: Any = None) -> Transport | None:
    """Return a new transport of the ranks that train together, in their order.

    A collective call of these ranks. Each exchange needs a private transport, so that messages of concurrent exchanges
    do not mix. It uses torch.distributed for process groups of torch whose processes no MPI launcher has started, and
    otherwise MPI.

    Args:
        members: A Horovod process set, a torch process group, or an MPI communicator; None: all ranks of Horovod if it
            is initialized, otherwise all ranks of torch's default process group, and without one all ranks of MPI.

    Returns:
        The transport, or None on a rank that is not a member.

    Raises:
        ValueError: The process set is not registered with Horovod.
        RuntimeError: Horovod, MPI or torch lacks a required feature; the message names the remedy.
    """
    if members == distributed.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns on ranks outside of the group
        return None
    transport: Transport | None = (
        _transport_over_torch(members) if _over_torch(members) else mpi_members().transport_of(members)
    )
    if transport is not None:
        earlier = _measured.setdefault(tuple(transport.members), [])
        with process.communicating(_CALL, transport):
            earlier.append(transport.inherit(earlier))
    return transport


def _transport_over_torch(members: Any) -> TorchTransport:
    """Return a new transport over torch.distributed; a collective call of the members."""
    process.join(torch_job.job())
    if process.world is None:
        process.world = TorchTransport.of(range(distributed.get_world_size()))
        process.watch.start(process.world)
    transport = TorchTransport.of(distributed.get_process_group_ranks(members))
    with process.communicating(_CALL, transport):
        return transport.connect()


def job() -> Job:
    """Return the job that this process belongs to."""
    own: Job = torch_job.job() if _over_torch(None) else mpi_members().job()
    return own


def _over_torch(members: Any) -> bool:
    """Return whether ranks communicate over torch.distributed; the same on all of them."""
    if members is not None and not isinstance(members, distributed.ProcessGroup):
        return False
    hvd = sys.modules.get("horovod.torch")
    if not distributed.is_initialized() or (members is None and hvd is not None and hvd.is_initialized()):
        return False
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return True
    # If another launcher started the processes, each is a singleton to MPI.
    return bool(mpi.COMM_WORLD.Get_size() != distributed.get_world_size())


def mpi_members() -> ModuleType:
    """Return the module that needs mpi4py.

    Raises:
        RuntimeError: There is no MPI.
    """
    try:
        return importlib.import_module("horovod_sparse.frontends.mpi_members")
    except ImportError as error:
        raise RuntimeError(
            f"cannot use MPI ({error}): start the program with torchrun and call "
            "torch.distributed.init_process_group() first, or install mpi4py and an MPI library"
        ) from error

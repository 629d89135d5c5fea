"""DDP's door for other people's trainers: the process group, and the hook on a model that DDP has wrapped."""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse as hvs


def start(options: argparse.Namespace) -> None:
    """The process group; rank, size and address come from MPI, not from variables."""
    if options.compression != "none":
        hvs.ddp.init_process_group("gloo")
        return
    world = MPI.COMM_WORLD
    address = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = socket.gethostname(), str(free.getsockname()[1])
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = world.bcast(address)
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)


def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Any:
    """The state of the exchange that the options ask for; None: DDP's own."""
    if options.compression == "none":
        return None
    state = hvs.ddp.SparseState(compression=hvs.parse(options.compression), optimizer=optimizer)
    model.register_comm_hook(state, hvs.ddp.sparse_hook)
    return state

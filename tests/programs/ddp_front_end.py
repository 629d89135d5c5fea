"""DDP's front end for other people's trainers: the hook on a model that DDP has wrapped."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse as hvs


def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Any:
    """The state of the exchange that the options ask for; None: DDP's own."""
    if options.compression == "none":
        return None
    state = hvs.ddp.SparseState(compression=hvs.parse(options.compression), optimizer=optimizer)
    model.register_comm_hook(state, hvs.ddp.sparse_hook)
    return state

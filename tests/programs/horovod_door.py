"""Horovod's optimizer for trainers that hand a closure to step()."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import MethodType
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs


def distribute(optimizer: torch.optim.Optimizer, net: nn.Module, options: argparse.Namespace) -> Any:
    """The optimizer with the exchange that the options ask for, after rank 0's parameters have been sent to all."""
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    arguments = {"named_parameters": net.named_parameters(), "backward_passes_per_step": options.accumulate}
    if options.compression != "none":
        return hvs.DistributedOptimizer(optimizer, compression=hvs.parse(options.compression), **arguments)
    stock = hvd.DistributedOptimizer(optimizer, **arguments)
    stock.step = MethodType(closure_first(type(stock).step), stock)
    return stock


def closure_first(step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Horovod's step(closure) exchanges before the closure has computed the gradients: this one does afterwards."""

    def with_closure(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        step(optimizer)
        return loss

    return with_closure


def clip(optimizer: Any, net: nn.Module, norm: float) -> None:
    """Clips the exchanged gradients, which are the same on every rank; step() must not exchange them again."""
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(net.parameters(), norm)

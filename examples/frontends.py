"""Two front ends of train.py to the other ranks: Horovod, and torch's DistributedDataParallel.

A script of your own goes through one of them. The lines marked "sparse" are what a plain one lacks.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import horovod_sparse as hvs  # sparse
from horovod_sparse import metrics

DENSE = ("none", "fp16")  # what both exchange without us


class Horovod:
    """Horovod: the optimizer exchanges gradients.

    Args:
        args: train.py's arguments.

    Attributes:
        exchange: Tells of a sparse exchange.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import horovod.torch as hvd  # here, as the other front end does without

        hvd.init()
        self._hvd = hvd
        self._args = args
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()

    def replicate(self, model: nn.Module) -> nn.Module:
        """Moves a model to its device, equal on all ranks; returns the one to train."""
        # While it is on the CPU: for this, Horovod need not have been built with CUDA.
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._model = model.to(self._args.device)
        return self._model

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Lets gradients be exchanged; returns the optimizer to step with."""
        if compression in DENSE:
            compression = getattr(self._hvd.Compression, compression)
        self.exchange = hvs.DistributedOptimizer(  # sparse: hvd.DistributedOptimizer in a plain script
            optimizer,
            named_parameters=self._model.named_parameters(),
            # With one pass more than there are, no gradient is due before synchronize().
            backward_passes_per_step=self._args.backward_passes_per_step + self._args.no_overlap,
            compression=compression,  # sparse
            grad_scaler=scaler,  # sparse
        )
        return self.exchange

    def accumulating(self) -> AbstractContextManager[None]:
        """Around a backward pass that another one follows; this optimizer counts them itself."""
        return nullcontext()

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Around what is done with the mean of all ranks' gradients."""
        with metrics.span("synchronize"):
            self.exchange.synchronize()
        with self.exchange.skip_synchronize():
            yield

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The sum over the ranks, on the CPU; Horovod lets those meet that have the same name."""
        total: Tensor = self._hvd.allreduce(tensor.cpu(), op=self._hvd.Sum, name=name)
        return total


class LocalSteps(Horovod):
    """Horovod, whose ranks exchange only every so many steps how far they have come (``--local-steps``)."""

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Lets ranks meet; returns the optimizer to step with."""
        self.exchange = hvs.LocalOptimizer(  # sparse
            optimizer,
            self._model.named_parameters(),
            self._args.local_steps,
            hvs.Compression.dense() if compression in DENSE else compression,
            outer=hvs.OuterSGD(self._args.outer_lr, self._args.outer_momentum),
            grad_scaler=scaler,
        )
        return self.exchange

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Around what is done with this rank's own gradients."""
        yield


class DDP:
    """torch's DistributedDataParallel: the model exchanges gradients, within backward().

    Args:
        args: train.py's arguments.

    Attributes:
        exchange: Tells of a sparse exchange; None: it is dense.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        hvs.ddp.init_process_group()  # sparse: distributed.init_process_group() in a plain script, under torchrun
        atexit.register(distributed.destroy_process_group)
        self._args = args
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.exchange: Any = None

    def replicate(self, model: nn.Module) -> nn.Module:
        """Moves a model to its device, equal on all ranks; returns the one to train."""
        self._model = DistributedDataParallel(model.to(self._args.device))
        return self._model

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Lets gradients be exchanged; returns the optimizer to step with."""
        chosen: list[Any] = [None] * self.size
        distributed.all_gather_object(chosen, self._args.compression)
        if len(set(chosen)) > 1:  # some would call the hook of another exchange, and wait for each other
            sys.exit(f"train.py: rank {self.rank}: --compression differs between ranks: {', '.join(chosen)}")
        if compression == "fp16":
            self._model.register_comm_hook(None, fp16_compress_hook)
        elif compression != "none":
            names = self._model.module.named_parameters()
            self.exchange = hvs.ddp.SparseState(compression, optimizer, names, grad_scaler=scaler)  # sparse
            self._model.register_comm_hook(self.exchange, hvs.ddp.sparse_hook)  # sparse
        return optimizer

    def accumulating(self) -> AbstractContextManager[None]:
        """Around a forward and backward pass that others follow before the step."""
        no_sync: AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    def exchanged(self) -> AbstractContextManager[None]:
        """Around what is done with the mean of all ranks' gradients, which backward() has left."""
        return nullcontext()

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The sum over the ranks, on the CPU."""
        del name  # collectives meet in the order of the program
        total = tensor.to(self._args.device, copy=True)  # where NCCL is
        distributed.all_reduce(total)
        return total.cpu()


FrontEnd = Horovod | DDP
FRONT_ENDS: dict[str, type[Horovod] | type[DDP]] = {"horovod": Horovod, "ddp": DDP}

"""Front ends of train.py: Horovod, and torch's DistributedDataParallel.

A script needs only one of them. Lines marked "sparse" are those that differ in a script with dense gradients.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import horovod_sparse as hvs  # sparse
from horovod_sparse import metrics

DENSE = ("none", "fp16")  # compressions built into both front ends


class Horovod:
    """Horovod front end: the optimizer exchanges gradients.

    Args:
        args: Arguments of train.py.

    Attributes:
        exchange: Wrapped optimizer; holds the statistics of a sparse exchange.
        comm: Communicator of all ranks, for ``metrics.export``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        try:
            import horovod.torch as hvd  # imported here, as the DDP front end does not need them
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            sys.exit(
                f"train.py: {error}: `horovod-sparse check` shows what is missing; --frontend ddp needs no Horovod"
            )

        hvd.init()
        self.comm = MPI.COMM_WORLD
        self._hvd = hvd
        self._args = args
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()

    def replicate(self, model: nn.Module) -> nn.Module:
        """Broadcast the parameters, move the model to its device, and return the model to train."""
        # Broadcast on the CPU, which works even if Horovod was built without CUDA.
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._model = model.to(self._args.device)
        return self._model

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Enable the exchange of gradients; return the optimizer to step with."""
        if compression in DENSE:
            compression = getattr(self._hvd.Compression, compression)
        self.exchange = hvs.DistributedOptimizer(  # sparse: hvd.DistributedOptimizer in a plain script
            optimizer,
            named_parameters=self._model.named_parameters(),
            # With --no-overlap, one extra pass delays every exchange until synchronize().
            backward_passes_per_step=self._args.backward_passes_per_step + self._args.no_overlap,
            compression=compression,  # sparse
            grad_scaler=scaler,  # sparse
        )
        return self.exchange

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a null context for all but the last backward pass of a step: the optimizer counts the passes."""
        return nullcontext()

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Wait for the exchange, then run the block; in it, gradients are averages over all ranks."""
        with metrics.span("synchronize"):
            self.exchange.synchronize()
        with self.exchange.skip_synchronize():
            yield

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum over all ranks, on the CPU. Horovod matches tensors across ranks by name."""
        total: Tensor = self._hvd.allreduce(tensor.cpu(), op=self._hvd.Sum, name=name)
        return total


class LocalSteps(Horovod):
    """Horovod front end with local steps: ranks exchange parameter changes every H steps (``--local-steps H``)."""

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Enable the exchange of parameter changes; return the optimizer to step with."""
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
        """Run the block; in it, gradients are local to this rank."""
        yield


class DDP:
    """DistributedDataParallel front end: the model exchanges gradients during ``backward()``.

    Args:
        args: Arguments of train.py.

    Attributes:
        exchange: State of the hook, with the statistics of a sparse exchange; None if the exchange is dense.
        comm: Communicator of all ranks, for ``metrics.export``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        hvs.ddp.init_process_group()  # distributed.init_process_group() in a script that needs torchrun
        self.comm = self
        atexit.register(distributed.destroy_process_group)
        self._args = args
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.exchange: Any = None
        self._postponed: list[tuple[Callable[[Any], Any], Any]] = []  # with --no-overlap: hook and bucket

    def replicate(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and return it wrapped in DDP, which broadcasts the parameters."""
        self._model = DistributedDataParallel(model.to(self._args.device))
        return self._model

    def connect(self, optimizer: Optimizer, compression: Any, scaler: torch.amp.GradScaler) -> Any:
        """Enable the exchange of gradients; return the optimizer to step with."""
        chosen: list[Any] = [None] * self.size
        distributed.all_gather_object(chosen, self._args.compression)
        if len(set(chosen)) > 1:  # different hooks would deadlock
            sys.exit(f"train.py: rank {self.rank}: --compression differs between ranks: {', '.join(chosen)}")
        if compression == "fp16":
            self._register(None, fp16_compress_hook)
        elif compression != "none":
            names = self._model.module.named_parameters()
            self.exchange = hvs.ddp.SparseState(compression, optimizer, names, grad_scaler=scaler)  # sparse
            self._register(self.exchange, hvs.ddp.sparse_hook)  # sparse
        elif self._args.no_overlap:
            self._register(None, allreduce_hook)
        return optimizer

    def _register(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register a communication hook; with --no-overlap, ``exchanged()`` calls it, after the backward pass."""
        if not self._args.no_overlap:
            self._model.register_comm_hook(state, hook)
            return

        def postpone(state: Any, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are strings
            device = bucket.buffer().device
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
            done.set_result(bucket.buffer())
            self._postponed.append((partial(hook, state), bucket))
            return done

        self._model.register_comm_hook(state, postpone)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context for all but the last forward and backward pass of a step."""
        no_sync: AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Run the block; in it, gradients are averages over all ranks. With --no-overlap, exchange them first."""
        if self._postponed:
            with metrics.span("synchronize"):
                for future in [hook(bucket) for hook, bucket in self._postponed]:
                    future.wait()  # each of the hooks writes the result into its bucket
                for _, bucket in self._postponed:
                    for parameter, average in zip(bucket.parameters(), bucket.gradients(), strict=True):
                        parameter.grad.copy_(average)
            self._postponed.clear()
        yield

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum over all ranks, on the CPU."""
        del name  # torch matches collectives by call order
        total = tensor.to(self._args.device, copy=True)  # NCCL requires device tensors
        distributed.all_reduce(total)
        return total.cpu()

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on the rank ``root``."""
        gathered: list[Any] | None = [None] * self.size if self.rank == root else None
        distributed.gather_object(sendobj, gathered, dst=root)
        return gathered


FrontEnd = Horovod | DDP
FRONT_ENDS: dict[str, type[Horovod] | type[DDP]] = {"horovod": Horovod, "ddp": DDP}

"""The ways by which a training's gradients are exchanged, and what each of them sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse as hvs
from benchmarks.convergence.ahead import Ahead
from benchmarks.convergence.runs import Run
from horovod_sparse import ddp, metrics
from horovod_sparse.collectives.base import Base

# torch's hook lets the gradients of the first steps travel whole.
POWERSGD_START = 10

Place = Callable[[], AbstractContextManager[None]]


class Exchanged:
    """A model whose gradients are summed over the ranks, by Horovod or by ``hvs.DistributedOptimizer``.

    With local steps, it is how far its ranks have come that is, by ``hvs.LocalOptimizer``.

    Args:
        model: The model.
        optimizer: Its optimizer, which knows nothing of other ranks.
        run: Its spec and local steps.
        spec: The run's, for the steps of the training.
        bucket_bytes: Of the gradients.

    Attributes:
        forward: The function from inputs to logits.
        optimizer: The wrapped optimizer.
        place: Where gradients are computed.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, spec: str, bucket_bytes: int
    ) -> None:
        compression = hvs.parse(spec)
        if isinstance(compression, hvs.Sparse):
            compression = replace(compression, dense_below=0, bucket_bytes=bucket_bytes)
            options = compression.collective
            if isinstance(options, Base.Options) and options.indices is None:  # this machine's memory would decide
                compression = replace(compression, collective=replace(options, indices="plain"))
        self.forward: nn.Module = model
        self.optimizer: Any = (
            hvs.LocalOptimizer(
                optimizer, model.named_parameters(), run.local_steps, compression, hvs.OuterSGD(*run.outer)
            )
            if run.local_steps
            else hvs.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        )
        self.place: Place = Ahead(self.optimizer, run.ahead == "mean") if run.ahead else nullcontext
        self._sparse = isinstance(compression, hvs.Sparse)
        self._bytes = 2 if compression is hvs.Compression.fp16 else 4
        self._size = sum(parameter.numel() for parameter in model.parameters())

    def traffic(self, steps: int) -> tuple[float, float]:
        """Bytes and gradient entries that this rank has sent in so many steps.

        Horovod counts none: a ring allreduce, which sends the fewest bytes, sends 2 (P-1)/P of the gradients'.
        """
        if self._sparse:
            entries = sum(span.details["entries"] for span in metrics.spans() if span.name == "exchange")
            return float(self.optimizer.traffic.bytes_sent), float(entries)
        entries = steps * self._size
        return ring(self._bytes * entries), float(entries)

    def residual_bytes(self) -> int:
        """Bytes of the arrays that this rank's memories keep from one step to the next, over all buckets.

        It is what ``exchange.state_dict`` holds of them. A memory that forgets keeps nothing, though the selection
        needs a scratch buffer of the bucket's size.
        """
        if not self._sparse:
            return 0
        return sum(_nbytes(bucket.get("memory")) for bucket in self.optimizer.exchange.state_dict()["buckets"])


class PowerSGD:
    """A model in torch's DistributedDataParallel with its PowerSGD hook (Vogels et al. 2019), over Gloo.

    All gradients are one bucket: over Gloo, the hook mixes up the collectives of several.

    Args:
        model: The model.
        optimizer: Its optimizer.
        rank: Of the approximation.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        if not torch.distributed.is_initialized():
            ddp.init_process_group("gloo")
        self.forward: nn.Module = DistributedDataParallel(model, bucket_cap_mb=1000)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
        self.forward.register_comm_hook(self._state, powerSGD_hook)
        self.optimizer: Any = optimizer
        self.place: Place = nullcontext
        self._size = sum(parameter.numel() for parameter in model.parameters())

    def traffic(self, steps: int) -> tuple[float, float]:
        """As ``Exchanged.traffic``; the factors and small gradients are summed by ring allreduces of float32."""
        _, _, compressed = self._state.compression_stats()  # type: ignore[no-untyped-call]
        entries = compressed + min(steps, POWERSGD_START) * self._size
        return ring(4 * entries), float(entries)

    def residual_bytes(self) -> int:
        """Bytes of the error and of the factors, which are kept to start the next approximation with."""
        kept = (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict)
        return sum(tensor.nbytes for tensors in kept for tensor in tensors.values())


def exchange(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, spec: str, bucket_bytes: int
) -> Exchanged | PowerSGD:
    """The exchange that a run's spec names; a collective call."""
    power = re.fullmatch(r"powersgd:rank=(\d+)", spec)
    if power:
        return PowerSGD(model, optimizer, int(power[1]))
    return Exchanged(model, optimizer, run, spec, bucket_bytes)


def ring(nbytes: float) -> float:
    """Bytes that a rank sends in a ring allreduce of so many."""
    ranks: int = hvd.size()
    return 2 * (ranks - 1) / ranks * nbytes


def _nbytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(_nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, Tensor) else 0

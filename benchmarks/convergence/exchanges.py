"""Gradient exchanges of the convergence benchmark, and the bytes and entries that each sends."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import horovod_sparse as hvs
from benchmarks import power_sgd
from benchmarks.convergence.ahead import Ahead
from benchmarks.convergence.runs import Run
from benchmarks.gpt2.exchanges import Simulated, ring
from horovod_sparse.collectives.base import Base
from horovod_sparse.frontends.fsdp.rounding import Blocks
from horovod_sparse.transport.base import Transport

# torch's hook sends the gradients of the first steps dense.
POWERSGD_START = 10

Place = Callable[[], AbstractContextManager[None]]


class Exchanged:
    """A model whose gradients are exchanged by Horovod, ``hvs.DistributedOptimizer`` or ``hvs.LocalOptimizer``.

    If the ranks are threads, ``Simulated`` exchanges the gradients. ``spec`` is the compression of the run for its
    number of steps, in the syntax of ``hvs.parse``.

    Attributes:
        forward: Function from inputs to logits.
        optimizers: Optimizers whose steps follow the backward pass.
        place: Function that returns the context in which to compute gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        run: Run,
        spec: str,
        bucket_bytes: int,
        transport: Transport,
    ) -> None:
        # Horovod's dense exchange needs MPI; ours has the same sums in another order.
        compression = _configuration("dense" if transport.job is None and spec == "none" else spec, bucket_bytes)
        self.forward: nn.Module = model
        self.place: Place = nullcontext
        self._ranks = transport.size
        self._sparse = isinstance(compression, hvs.Sparse)
        self._bytes = 4
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._sums: Counter[str] = Counter()
        self.optimizers: list[Any] = list(optimizers)
        self._exchanging: list[Any]
        if transport.job is None:
            if not isinstance(compression, hvs.Sparse):
                raise ValueError(f"{run.name} cannot be simulated: train it without --simulate")
            self._exchanging = [Simulated(model, one, compression, transport) for one in optimizers]
            return
        if run.local_steps:
            settings: dict[str, Any] = {"fragments": run.fragments, "delay": run.delay}
            self.optimizers = [
                hvs.LocalOptimizer(
                    one,
                    named_parameters(model, one),
                    run.local_steps,
                    compression,
                    hvs.OuterSGD(*run.outer),
                    **settings,
                )
                for one in optimizers
            ]
        else:
            self.optimizers = [
                hvs.DistributedOptimizer(one, named_parameters(model, one), compression) for one in optimizers
            ]
        self._exchanging = self.optimizers
        if run.ahead:
            self.place = Ahead(self.optimizers[0], run.ahead == "mean")
        if compression is hvs.Compression.fp16:
            self._bytes = 2

    def traffic(self, steps: int) -> tuple[float, float]:
        """Return bytes and gradient entries that this rank has sent in a number of steps.

        Horovod does not count its bytes. They are computed for a ring allreduce, which sends the fewest: 2 (P-1)/P
        times the bytes of the gradients.
        """
        if self._sparse:
            return float(sum(one.traffic.bytes_sent for one in self._exchanging)), self._counted("entries")
        entries = steps * self._size
        return ring(self._bytes * entries, self._ranks), float(entries)

    def seconds(self, stage: str) -> float:
        """Return the seconds that this rank has spent in a stage of the pipeline."""
        return self._counted(f"seconds_{stage}") if self._sparse else 0.0

    def _counted(self, name: str) -> float:
        for key, value in itertools.chain(*(one.statistics().items() for one in self._exchanging)):
            scope, _, counted = key.partition("/")
            if scope == "total":
                self._sums[counted] += value
        return float(self._sums[name])

    def residual_bytes(self) -> int:
        """Return the bytes of the arrays that this rank's memories keep between steps, over all buckets.

        A memory without error feedback keeps nothing, although the selection needs a scratch buffer of a bucket's size.
        """
        if not self._sparse:
            return 0
        buckets = itertools.chain(*(one.exchange.state_dict()["buckets"] for one in self._exchanging))
        return sum(_nbytes(bucket.get("memory")) for bucket in buckets)


def named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters of a model that an optimizer trains."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in model.named_parameters() if p in own]


def _configuration(spec: str, bucket_bytes: int) -> Any:
    """Return the compression, with the task's buckets and an index format that does not depend on this machine."""
    compression = hvs.parse(spec)
    if not isinstance(compression, hvs.Sparse):
        return compression
    compression = replace(compression, dense_below=0, bucket_bytes=bucket_bytes)
    options = compression.collective
    if isinstance(options, Base.Options) and options.indices is None:
        compression = replace(compression, collective=replace(options, indices="plain"))
    return compression


class PowerSGD:
    """A model with torch's PowerSGD hook (Vogels et al. 2019); ``rank`` is that of the approximation."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int) -> None:
        self.forward: nn.Module
        self.forward, self._state = power_sgd(model, rank, POWERSGD_START)
        self.optimizers: list[Any] = list(optimizers)
        self.place: Place = nullcontext
        self._size = sum(parameter.numel() for parameter in model.parameters())

    def traffic(self, steps: int) -> tuple[float, float]:
        """Return the traffic as ``Exchanged.traffic`` does; ring allreduces sum float32 factors and small gradients."""
        _, _, compressed = self._state.compression_stats()
        entries = compressed + min(steps, POWERSGD_START) * self._size
        return ring(4 * entries, hvd.size()), float(entries)

    def seconds(self, stage: str) -> float:
        """Return 0: the hook is not timed."""
        del stage
        return 0.0

    def residual_bytes(self) -> int:
        """Return the bytes of the error and of the factors, which start the next approximation."""
        kept = (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict)
        return sum(tensor.nbytes for tensors in kept for tensor in tensors.values())


class Sharded:
    """A model that ``fully_sharded`` has sharded, with a sparse reduce-scatter and rounded parameters if wanted.

    Bytes of FSDP2's own collectives are computed for rings, which send the fewest.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], run: Run, spec: str, ranks: int
    ) -> None:
        self.forward = model
        self.optimizers: list[Any] = list(optimizers)
        self.place: Place = nullcontext
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._ranks, self._width = ranks, run.gathered / 8
        if run.gathered < 16:
            hvs.fsdp.rounded_all_gather(model, run.gathered)
            blocks = Blocks(run.gathered)
            self._width = (blocks.width + blocks.scale_bytes) / blocks.size
        self._exchange, self._entries = None, 0.0
        if spec != "none":
            compression = _configuration(spec, 1)  # buckets are FSDP's units
            self._exchange = hvs.fsdp.sparse_reduce_scatter(model, compression, optimizers)

    def traffic(self, steps: int) -> tuple[float, float]:
        """Return the traffic as ``Exchanged.traffic`` does: parameters are gathered twice in a step."""
        share = (self._ranks - 1) / self._ranks * steps * self._size
        gathered = 2 * self._width * share
        if self._exchange is None:
            return gathered + 2 * share, float(steps * self._size)
        self._entries += self._exchange.statistics()["total/entries"]
        return gathered + self._exchange.traffic.bytes_sent, self._entries

    def seconds(self, stage: str) -> float:
        """Return 0: stages are not timed."""
        del stage
        return 0.0

    def residual_bytes(self) -> int:
        """Return the bytes that this rank's memories keep between steps."""
        buckets = () if self._exchange is None else self._exchange.state_dict()["buckets"]
        return sum(_nbytes(bucket.get("memory")) for bucket in buckets)


def fully_sharded(model: nn.Module) -> None:
    """Shard a transformer of ``stdlib`` over all ranks, layer by layer; it computes and reduces in bfloat16.

    The loss is computed in float32: a sum in bfloat16 would round a perplexity to steps of 0.4 %.
    """
    if not distributed.is_initialized():
        hvs.ddp.init_process_group("gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    layers: Any = model.get_submodule("layers.layers")
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32))


Exchange = Exchanged | PowerSGD | Sharded


def exchange(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    run: Run,
    spec: str,
    bucket_bytes: int,
    transport: Transport,
) -> Exchange:
    """Return the exchange of a run; a collective call."""
    if run.gathered:
        return Sharded(model, optimizers, run, spec, transport.size)
    power = re.fullmatch(r"powersgd:rank=(\d+)", spec)
    if power and transport.job is not None:
        return PowerSGD(model, optimizers, int(power[1]))
    return Exchanged(model, optimizers, run, spec, bucket_bytes, transport)


def _nbytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(_nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, Tensor) else 0

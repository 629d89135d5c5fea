"""Gradient exchanges of simulated ranks, which are threads of one process with a replica of the model each.

Needs neither MPI nor Horovod. ``Simulated`` runs the package's own pipeline; ``Averaging`` and ``PowerSGD`` are what it
is compared with, in torch alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import horovod_sparse as hvs
from horovod_sparse.control.report import limits
from horovod_sparse.frontends.base import ExchangingGradients
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.optimizers import group_numbers
from horovod_sparse.transport.base import Transport

POWERSGD_START = 10  # steps that are sent dense first, as in the convergence benchmark
_LEAST_RATIO = 2  # by which factors must be smaller than their matrix, as in torch's hook


class Simulated(ExchangingGradients):
    """Front end of a simulated rank: exchanges gradients before each step of a plain optimizer.

    Args:
        model: Replica of the model on this rank.
        optimizer: Optimizer of all or some of its parameters; gets two hooks.
        compression: The configuration.
        transport: The ranks.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, compression: hvs.Sparse, transport: Transport
    ) -> None:
        optimizer.register_step_pre_hook(self._exchange_gradients)  # before those that the exchange registers
        self._exchange = self.exchange = GradientExchange(
            compression,
            transport,
            [optimizer],
            1 / transport.size,
            limits(None, None),
            without_exchange="without a step",
            between_steps=lambda: True,  # the exchange is part of the step
        )
        trained = group_numbers([optimizer])
        self.exchange.create_buckets({name: p for name, p in model.named_parameters() if p in trained})

    def _exchange_gradients(self, *_: object) -> None:
        worker = self.exchange.worker
        with worker.completing():
            for p, name in self.exchange.names.items():
                if name in worker and p.grad is not None:
                    worker.put(name, p.grad)
            worker.wait_for_results()

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent."""
        return float(self.traffic.bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange on the host."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, after that of the optimizer."""
        self.exchange.load_state_dict(state)


class Board:
    """Sums of tensors over ranks that are threads.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._posted: list[Sequence[Tensor]] = [()] * ranks

    def means(self, transport: Transport, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the ranks, with the same bits on all of them; a collective call."""
        self._posted[transport.rank] = tensors
        transport.barrier()
        means = [torch.stack(everyones).mean(0) for everyones in zip(*self._posted, strict=True)]
        transport.barrier()
        return means


class Averaging:
    """Exchange that averages the gradients before each step of an optimizer, without compression.

    Args:
        optimizer: The optimizer; gets a hook.
        transport: The ranks.
        board: Board of these ranks.

    Attributes:
        bytes_sent: Bytes that this rank would have sent in ring allreduces.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, transport: Transport, board: Board) -> None:
        self.bytes_sent = 0.0
        self._transport, self._board = transport, board
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(self._exchange_gradients)

    @torch.no_grad()
    def _exchange_gradients(self, *_: object) -> None:
        self._average(self._parameters)

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Overwrite gradients with their means."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient, mean in zip(gradients, self._means(gradients), strict=True):
            gradient.copy_(mean)

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.bytes_sent += ring(sum(tensor.nbytes for tensor in tensors), self._transport.size)
        return self._board.means(self._transport, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class PowerSGD(Averaging):
    """Low-rank approximation with error feedback (Vogels et al. 2019, algorithms 1 and 2).

    A gradient of n x m, flattened from its second dimension on, is approximated by P Q^T with one step of subspace
    iteration from the last Q. Gradients of a shape are computed as one batch. Small gradients are averaged.

    Args:
        optimizer: The optimizer; gets a hook.
        transport: The ranks.
        board: Board of these ranks.
        rank: Rank of the approximation.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, transport: Transport, board: Board, rank: int) -> None:
        super().__init__(optimizer, transport, board)
        self._steps = 0
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._others: list[Tensor] = []
        for p in self._parameters:
            n, m = p.shape[0], p[0].numel()
            worthwhile = p.dim() > 1 and _LEAST_RATIO * rank * (n + m) < n * m
            (self._groups[n, m] if worthwhile else self._others).append(p)
        generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._errors, self._factors = [], []
        for (n, m), group in self._groups.items():
            self._errors.append(group[0].new_zeros(len(group), n, m))
            self._factors.append(torch.randn(len(group), m, rank, generator=generator).to(group[0].device))

    @torch.no_grad()
    def _exchange_gradients(self, *_: object) -> None:
        self._steps += 1
        if self._steps <= POWERSGD_START:
            self._average(self._parameters)
            return
        self._average(self._others)
        for error, group in zip(self._errors, self._groups.values(), strict=True):
            error += torch.stack([p.grad.flatten(1) for p in group if p.grad is not None])
        left = self._means([error @ factor for error, factor in zip(self._errors, self._factors, strict=True)])
        left = [torch.linalg.qr(one).Q for one in left]
        self._factors = self._means([error.mT @ one for error, one in zip(self._errors, left, strict=True)])
        for error, one, factor, group in zip(self._errors, left, self._factors, self._groups.values(), strict=True):
            approximation = one @ factor.mT
            error -= approximation
            for p, part in zip(group, approximation, strict=True):
                p.grad = part.view_as(p)

    def state_dict(self) -> dict[str, Any]:
        """Return errors, factors and the number of steps."""
        return {"steps": self._steps, "errors": self._errors, "factors": self._factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._steps = state["steps"]
        for name, own in (("errors", self._errors), ("factors", self._factors)):
            own[:] = [saved.to(one.device, copy=True) for one, saved in zip(own, state[name], strict=True)]


def exchange_for(
    spec: str, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport, board: Board
) -> Simulated | Averaging:
    """Return the exchange of a specification on one rank; a collective call.

    Args:
        spec: ``none``, ``powersgd:rank=4`` or similar, or a compression in the syntax of ``hvs.parse``.
        model: Replica of the model on this rank.
        optimizer: Optimizer of the replica.
        transport: The ranks.
        board: Board of these ranks.

    Raises:
        ValueError: The specification is invalid.
    """
    power = re.fullmatch(r"powersgd:rank=(\d+)", spec)
    if power:
        return PowerSGD(optimizer, transport, board, int(power[1]))
    if spec == "none":
        return Averaging(optimizer, transport, board)
    return Simulated(model, optimizer, compression_of(spec), transport)


def compression_of(spec: str) -> hvs.Sparse:
    """Return a compression; that of ``recommended`` has a fixed collective, as threads have no network to measure.

    Raises:
        ValueError: The specification is invalid, or is that of an exchange that only Horovod has.
    """
    preset, _, options = spec.partition(":")
    if preset == "recommended":
        spec = f"{preset}:collective=topka,indices=coded,{options}".rstrip(",")
    compression = hvs.parse(spec)
    if not isinstance(compression, hvs.Sparse):
        raise ValueError(f"{spec!r} needs Horovod: use dense or none")
    return compression


def ring(nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring allreduce of an array of this size."""
    return 2 * (ranks - 1) / ranks * nbytes

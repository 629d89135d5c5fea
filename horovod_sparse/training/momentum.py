"""Momentum where no memory applies it: that of gradients that travel whole, and that of the weight decay."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from horovod_sparse.compression import Sparse
from horovod_sparse.training.arguments import has_momentum
from horovod_sparse.training.exchange import Exchange

# The name that torch's SGD gives it. Without momentum of its own, SGD leaves it as it is.
_BUFFER = "momentum_buffer"


class StepMomentum:
    """u = m u + (g + decay p), whose part from earlier steps is added to the gradients before an optimizer's step.

    The optimizer has no momentum and adds decay * p itself: together this is momentum SGD, where g is counted. It is in
    parameters that travel whole, and on one rank alone. Elsewhere the memory has the momentum of g, and u is that of
    the weight decay (the authors' DGCSGD). Only SGD's decay is a part of the gradient that momentum is for.

    u is the same on every rank and in the unit of gradients, and lies in the optimizer's state, where broadcasts and
    checkpoints find it. A step that is skipped does not come here.

    Attributes:
        options: Of the momentum: those of ``MomentumCorrection``.
        exchanges: Of the optimizer's gradients; none where this rank takes part in none.
    """

    options: Any

    def __init__(self) -> None:
        self.exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        # Optimizers make a parameter's state in their first step, where they find none.
        self._new: dict[torch.Tensor, torch.Tensor] = {}

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hook before an optimizer's step; with a closure, momentum comes after that."""
        if has_momentum(optimizer):
            raise RuntimeError(
                f"the compression applies momentum, but {type(optimizer).__name__} has been given momentum, too, since "
                "it was made: by a scheduler (give OneCycleLR cycle_momentum=False), or by a state that was loaded"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._apply(optimizer)
            return None

        def with_momentum() -> Any:
            loss = closure()
            self._apply(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": with_momentum}

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook after an optimizer's step."""
        for p, buffer in self._new.items():
            optimizer.state[p][_BUFFER] = buffer
        self._new.clear()

    @torch.no_grad()
    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        overflow, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if overflow is not None and overflow.item():
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None:  # a GradScaler that lets torch's kernel unscale
            for gradient in gradients:
                gradient.div_(scale)
        self._clip(gradients)
        for group in optimizer.param_groups:
            decay = group["weight_decay"] if isinstance(optimizer, torch.optim.SGD) else 0.0
            decay = -decay if group.get("maximize") else decay  # p.grad points uphill then
            for p in group["params"]:
                if p.grad is not None and p.requires_grad:
                    self._add(optimizer, p, p.grad, decay)
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)

    def _clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clips what one rank alone has; of several, the worker does."""
        if self.options.max_norm is None or any(exchange.ranks > 1 for exchange in self.exchanges):
            return
        squares = [torch.linalg.vector_norm(_values(one), dtype=torch.float64) ** 2 for one in gradients]
        factor = self.options.clip(math.sqrt(sum(square.item() for square in squares)), 1)
        if factor != 1:
            for gradient in gradients:
                gradient.mul_(factor)

    def _add(self, optimizer: torch.optim.Optimizer, p: torch.Tensor, gradient: torch.Tensor, decay: float) -> None:
        # Sparse gradients (embeddings) are gathered by others, unless they were made dense.
        gathered = gradient.is_sparse and not getattr(optimizer, "sparse_as_dense", False)
        whole, m = gathered or self._travels_whole(p), self.options.momentum
        buffer = optimizer.state.get(p, {}).get(_BUFFER, self._new.get(p))
        if buffer is None:
            if not whole and not decay:
                return
            buffer = self._new[p] = torch.zeros_like(gradient)
        buffer.mul_(m)
        if self.options.nesterov:
            if whole:
                buffer.add_(gradient)
            if decay:
                buffer.add_(p, alpha=decay)
            gradient.add_(buffer, alpha=m)
        else:
            gradient.add_(buffer)
            if whole:
                buffer.copy_(gradient)
            if decay:
                buffer.add_(p, alpha=decay)

    def _travels_whole(self, p: torch.Tensor) -> bool:
        buckets = [exchange.worker.bucket_of(p) for exchange in self.exchanges]
        return all(bucket is None or bucket.layout.dense for bucket in buckets)


_applied: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepMomentum] = weakref.WeakKeyDictionary()


def apply_momentum(optimizer: torch.optim.Optimizer, sparse: Sparse, exchange: Exchange | None) -> None:
    """Lets an optimizer take its steps with the momentum of a compression, if that has any, where no memory applies it.

    Args:
        optimizer: Without momentum of its own. One that serves several models has several exchanges.
        sparse: The compression.
        exchange: Of the gradients; None: this rank takes part in none. Held weakly.
    """
    if sparse.momentum is None:
        return
    if optimizer not in _applied:
        _applied[optimizer] = momentum = StepMomentum()
        optimizer.register_step_pre_hook(momentum.before)
        optimizer.register_step_post_hook(momentum.after)
    _applied[optimizer].options = sparse.momentum
    if exchange is not None:
        _applied[optimizer].exchanges.add(exchange)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient

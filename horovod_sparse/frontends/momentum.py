"""Momentum in the place of the optimizer's, where no memory applies it: what travels whole, and the weight decay."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.frontends.moments import coupled_decay, enter_first_moment, has_momentum, is_known, momentum_of
from horovod_sparse.rules import Momentum
from horovod_sparse.transport.mpi import job

_LOG = logging.getLogger("horovod_sparse")
# The name that torch's SGD gives it. Without momentum, SGD leaves it as it is.
_BUFFER = "momentum_buffer"


class StepMomentum:
    """u = m u + (g + decay p), whose part from earlier steps is added to the gradients before an optimizer's step.

    The step itself applies no momentum and adds decay * p: together this is momentum SGD, where g is counted. It is in
    parameters that travel whole, and on one rank alone. Elsewhere the memory has the momentum of g, and u is that of
    the weight decay (the authors' DGCSGD).

    u is the same on every rank and in the unit of gradients, and lies in the optimizer's state, where broadcasts and
    checkpoints find it. A step that is skipped does not come here.

    Momentum that is taken over is missing in ``param_groups`` during the step alone. Adam keeps its first moment, and
    is given gradients that turn it into what the memory has made.

    Attributes:
        options: Of the momentum: those of ``MomentumCorrection``.
        exchanges: Of the optimizer's gradients; none where this rank takes part in none.
    """

    options: Any

    def __init__(self) -> None:
        self.exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        # Optimizers make a parameter's state in their first step, where they find none.
        self._new: dict[torch.Tensor, torch.Tensor] = {}
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and their settings but for the step

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hook before an optimizer's step; with a closure, momentum comes after that."""
        self._give_back()  # where the last step failed
        if self.options.own is not None and has_momentum(optimizer):
            raise RuntimeError(
                f"the compression applies momentum, but {type(optimizer).__name__} has been given momentum, too, since "
                "it was made: by a scheduler (give OneCycleLR cycle_momentum=False), or by a state that was loaded"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._apply(optimizer)
            return None

        def with_momentum() -> Any:
            self._give_back()  # an optimizer may evaluate it more than once
            loss = closure()
            self._apply(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": with_momentum}

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hook after an optimizer's step."""
        self._give_back()
        for p, buffer in self._new.items():
            optimizer.state[p][_BUFFER] = buffer
        self._new.clear()

    def _give_back(self) -> None:
        for group, settings in self._taken:
            group.update(settings)
        self._taken.clear()

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
        if self.options.own is not None or not self._alone:  # one rank alone selects nothing: the optimizer's is right
            for group in optimizer.param_groups:
                self._apply_to(optimizer, group)
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)

    def _clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clips what one rank alone has; of several, the worker does."""
        if self.options.max_norm is None or not self._alone:
            return
        squares = [torch.linalg.vector_norm(_values(one), dtype=torch.float64) ** 2 for one in gradients]
        factor = self.options.clip(math.sqrt(sum(square.item() for square in squares)), 1)
        if factor != 1:
            for gradient in gradients:
                gradient.mul_(factor)

    @property
    def _alone(self) -> bool:
        return all(exchange.ranks == 1 for exchange in self.exchanges)

    def _apply_to(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        momentum = self.options.own or momentum_of(optimizer, group)
        if not momentum.factor:
            return
        decay, moment = coupled_decay(optimizer, group), self.options.own is None and "betas" in group
        for p in group["params"]:
            if p.grad is None or not p.requires_grad:
                continue
            buckets = self._selecting(optimizer, p)
            if not moment:
                # Only SGD's decay is a part of the gradient that momentum is for.
                of_gradient = decay if isinstance(optimizer, torch.optim.SGD) else 0.0
                self._add(optimizer, p, momentum, of_gradient, whole=not buckets)
            elif buckets:
                sent_whole = all(bucket.pipeline.sent_whole for bucket in buckets)
                enter_first_moment(optimizer.state.get(p, {}), p, group, decay, sent_whole)
        if self.options.own is None and "momentum" in group:
            self._taken.append((group, {name: group[name] for name in ("momentum", "nesterov")}))
            group.update(momentum=0.0, nesterov=False)

    def _selecting(self, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[Bucket]:
        """The bucket in which a parameter is selected from; none where it travels whole."""
        # Sparse gradients (embeddings) are gathered by others, unless they were made dense.
        if p.grad is not None and p.grad.is_sparse and not getattr(optimizer, "sparse_as_dense", False):
            return []
        buckets = [exchange.worker.bucket_of(p) for exchange in self.exchanges]
        return [bucket for bucket in buckets if bucket is not None and not bucket.layout.dense]

    def _add(
        self, optimizer: torch.optim.Optimizer, p: torch.Tensor, momentum: Momentum, decay: float, whole: bool
    ) -> None:
        gradient, m, share = p.grad, momentum.factor, momentum.share
        assert gradient is not None
        buffer = optimizer.state.get(p, {}).get(_BUFFER, self._new.get(p))
        if buffer is None:
            if not (whole or decay or (self.options.own is None and isinstance(optimizer, torch.optim.SGD))):
                return
            buffer, share = torch.zeros_like(gradient), momentum.first
            self._new[p] = buffer
        buffer.mul_(m)
        if momentum.nesterov:  # without dampening
            if whole:
                buffer.add_(gradient)
            if decay:
                buffer.add_(p, alpha=decay)
            gradient.add_(buffer, alpha=m)
            return
        if whole and share != 1:
            gradient.mul_(share)
        gradient.add_(buffer)
        if whole:
            buffer.copy_(gradient)
        if decay:
            buffer.add_(p, alpha=share * decay)
            if share != 1:
                gradient.add_(p, alpha=(share - 1) * decay)  # the step adds all of it


_applied: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepMomentum] = weakref.WeakKeyDictionary()


def apply_momentum(optimizer: torch.optim.Optimizer, sparse: Sparse, exchange: Exchange | None) -> None:
    """Lets an optimizer take its steps with the momentum of a compression, if that has any, where no memory applies it.

    Args:
        optimizer: Without momentum of its own, unless the compression takes that over; of another class than
            ``SGD``, ``Adam`` and ``AdamW``, it keeps it, and a warning says so. One that serves several models has
            several exchanges.
        sparse: The compression.
        exchange: Of the gradients; None: this rank takes part in none. Held weakly.
    """
    if sparse.momentum is None:
        return
    if optimizer not in _applied:
        _applied[optimizer] = momentum = StepMomentum()
        optimizer.register_step_pre_hook(momentum.before)
        optimizer.register_step_post_hook(momentum.after)
        if sparse.takes_momentum_over:
            _warn_of_what_stays(optimizer)
    _applied[optimizer].options = sparse.momentum
    if exchange is not None:
        _applied[optimizer].exchanges.add(exchange)


def _warn_of_what_stays(optimizer: torch.optim.Optimizer) -> None:
    if has_momentum(optimizer) and not is_known(optimizer) and job().rank == 0:
        _LOG.warning(
            "rank 0: momentum of %s is applied after the selection, as the compression can take over that of SGD, Adam "
            "and AdamW only: use one of these, or say so by memory='residual'",
            type(optimizer).__name__,
        )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient

"""A compression's own momentum, in steps of an optimizer that has none."""

from __future__ import annotations

import torch

from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.momentum_hooks import MomentumHooks
from horovod_sparse.frontends.optimizers import coupled_decay, has_momentum, is_gathered, torch_class
from horovod_sparse.rules import Momentum

_BUFFER = "momentum_buffer"  # name in the state of torch's SGD, which leaves it unchanged without momentum


class OwnMomentum(MomentumHooks):
    """Applies a compression's own momentum to gradients and weight decay that the memory does not cover.

    u = m u + (g + decay p). The hooks add the velocity u of earlier steps to the gradient. The step itself applies no
    momentum and adds decay * p; together this is momentum SGD. u includes the gradient g only if the parameter is sent
    dense or there is a single rank. Otherwise the memory applies the momentum of g, and u is that of the weight decay
    alone, as in the authors' DGCSGD.

    u is the same on every rank, in the unit of gradients, and part of the optimizer's state, so that broadcasts and
    checkpoints include it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        # Optimizers initialize the state of a parameter in their first step if it is empty.
        self._new: dict[torch.Tensor, torch.Tensor] = {}

    @eager
    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Store new velocities in the optimizer's state."""
        for p, buffer in self._new.items():
            optimizer.state[p][_BUFFER] = buffer
        self._new.clear()
        super().after(optimizer)

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        if has_momentum(optimizer):
            raise RuntimeError(
                f"the compression applies momentum, but {type(optimizer).__name__} has been given momentum, too, "
                "since construction: by a scheduler (pass cycle_momentum=False to OneCycleLR), or by a loaded state"
            )
        for group in optimizer.param_groups:
            # Only SGD applies momentum to the weight decay.
            decay = coupled_decay(optimizer, group) if torch_class(optimizer) is torch.optim.SGD else 0.0
            for p in group["params"]:
                if p.grad is not None and p.requires_grad:
                    self._add(optimizer, p, self.options.own, decay, dense=not self._selected(optimizer, p))

    def _selected(self, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
        """Return whether a gradient is selected from; otherwise it is sent dense."""
        return not is_gathered(optimizer, p.grad) and any(p in exchange.delivered_of for exchange in self.exchanges)

    def _add(
        self, optimizer: torch.optim.Optimizer, p: torch.Tensor, momentum: Momentum, decay: float, dense: bool
    ) -> None:
        gradient, m = p.grad, momentum.factor
        assert gradient is not None
        buffer = optimizer.state.get(p, {}).get(_BUFFER, self._new.get(p))
        if buffer is None:
            if not (m and (dense or decay)):
                return
            buffer = self._new[p] = torch.zeros_like(gradient)
        buffer.mul_(m)
        if not momentum.nesterov:
            gradient.add_(buffer)
        if dense and momentum.nesterov:
            buffer.add_(gradient)
        elif dense:
            buffer.copy_(gradient)
        if decay:
            buffer.add_(p, alpha=decay)
        if momentum.nesterov:
            gradient.add_(buffer, alpha=m)

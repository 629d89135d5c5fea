"""Momentum of torch's optimizers when a compression applies momentum before the selection."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.momentum_hooks import MomentumHooks
from horovod_sparse.frontends.optimizers import has_momentum, is_adam, is_known, parameters_in
from horovod_sparse.frontends.optimizers_momentum import OptimizersMomentum
from horovod_sparse.frontends.own_momentum import OwnMomentum
from horovod_sparse.rules import Mode

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_LOG = logging.getLogger("horovod_sparse")
_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, MomentumHooks] = weakref.WeakKeyDictionary()


def register_momentum_hooks(
    optimizer: torch.optim.Optimizer, sparse: Sparse, exchange: GradientExchange | None
) -> None:
    """Register the step hooks that momentum before the selection needs.

    If the momentum is the optimizer's, the optimizer gets effective gradients (see ``Handover``) and keeps applying it.
    If it is the compression's own, the hooks apply it to what is sent dense and to the weight decay.

    Args:
        optimizer: The optimizer; without momentum if the compression has its own. If the compression uses the
            optimizer's, momentum of other classes than ``SGD``, ``Muon``, ``Adam`` and ``AdamW``, and of subclasses
            with their own ``step``, is applied after the exchange, and rank 0 logs a warning.
        sparse: The configuration; nothing is done if it applies no momentum.
        exchange: The exchange of the gradients, held weakly; None: it is not there yet, or this rank takes part in
            none. An optimizer of several models has several.

    Raises:
        ValueError: Signs of Adam's first moment are to be sent without dense steps before.
    """
    if sparse.momentum is None:
        return
    signs = sparse.mode is Mode.SIGNS and sparse.takes_momentum_over
    if signs and not sparse.dense_steps and is_adam(optimizer):
        raise ValueError(
            f"dense_steps must be at least 1, not 0, where signs of the first moment of {type(optimizer).__name__} are "
            "sent, as its second moment is that of the dense steps: use a fifth of all steps, as in "
            "onebit:memory=momentum,dense_steps=1000"
        )
    if optimizer not in _hooks:
        _hooks[optimizer] = (OptimizersMomentum if sparse.takes_momentum_over else OwnMomentum)(optimizer)
        if sparse.takes_momentum_over:
            _report(optimizer, sparse.momentum.fresh)
    _hooks[optimizer].options = sparse.momentum
    if exchange is not None:
        _hooks[optimizer].exchanges.add(exchange)


def hooks_of(exchange: GradientExchange) -> dict[torch.optim.Optimizer, MomentumHooks]:
    """Return the hooks of the optimizers of an exchange that have some."""
    return {optimizer: _hooks[optimizer] for optimizer in exchange.optimizers if optimizer in _hooks}


def _optimizers_of(exchange: GradientExchange) -> dict[torch.optim.Optimizer, OptimizersMomentum]:
    hooks = hooks_of(exchange).items()
    return {optimizer: known for optimizer, known in hooks if isinstance(known, OptimizersMomentum)}


def take_part_in_step(exchange: GradientExchange) -> None:
    """Take part in a step of the other ranks that this rank's optimizers do not take; a collective call."""
    for optimizer, known in _optimizers_of(exchange).items():
        known.take_part(optimizer)


def buffers_of(exchange: GradientExchange) -> dict[str, torch.Tensor]:
    """Return the momentum buffers that belong to the state of an exchange, by the keys of the gradients."""
    delivered_of = exchange.delivered_of
    found = [known.buffers(optimizer).items() for optimizer, known in _optimizers_of(exchange).items()]
    return {delivered_of[p].key: buffer for buffers in found for p, buffer in buffers if p in delivered_of}


def load_buffers(exchange: GradientExchange, buffers: Mapping[str, torch.Tensor]) -> None:
    """Load momentum buffers by the keys of the gradients; they may be flat."""
    given = {p: buffers[part.key] for p, part in exchange.delivered_of.items() if part.key in buffers}
    for optimizer, known in _optimizers_of(exchange).items():
        own = [p for p in parameters_in(optimizer) if p in given]
        known.load(optimizer, {p: given[p] for p in own})


def _report(optimizer: torch.optim.Optimizer, fresh: float | None) -> None:
    """Log what happens to an optimizer's momentum unless it stays as it is."""
    if job().rank or not has_momentum(optimizer):
        return
    if not is_known(optimizer):
        _LOG.warning(
            "rank 0: momentum of %s is applied after the exchange, as the compression only knows that of SGD, Adam, "
            "AdamW and Muon, and of subclasses without their own step(): use one of these, or memory='residual'",
            type(optimizer).__name__,
        )
    elif fresh is not None:
        _LOG.info(
            "rank 0: in sparse steps, momentum m of %s has the form %g u + %g / (1 - m) g, where u is the velocity and "
            "g the gradient with the weight that it has in u: fresh=None keeps the optimizer's own form",
            *(type(optimizer).__name__, 1 - fresh, fresh),
        )

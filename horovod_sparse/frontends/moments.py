"""Momentum of torch's optimizers: what a compression takes over of it, and how their own step goes on without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from horovod_sparse.rules import Momentum


def momentum_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Momentum:
    """The momentum of a param group in this step, as far as a compression can take it over.

    SGD's, and the first moment of Adam and AdamW. Other optimizers' are not linear in the gradients, or unknown: none.
    """
    if isinstance(optimizer, SGD):
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), 1 - float(group["dampening"]))
    if isinstance(optimizer, (Adam, AdamW)):
        beta = float(group["betas"][0])
        return Momentum(beta, share=1 - beta, first=1 - beta)
    return Momentum()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Tells if ``momentum_of`` knows the momentum of an optimizer."""
    return isinstance(optimizer, (SGD, Adam, AdamW))


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Tells if an optimizer has momentum of its own."""
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Weight decay that SGD and Adam add to the gradient; negative where ``p.grad`` points uphill."""
    coupled = isinstance(optimizer, (SGD, Adam)) and not isinstance(optimizer, AdamW)
    if not coupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])


def enter_first_moment(
    state: Mapping[str, Any], p: torch.Tensor, group: Mapping[str, Any], decay: float, sent_whole: bool
) -> None:
    """Lets Adam's step make ``p.grad``, which has momentum already, its first moment.

    The step adds decay * p to the gradient and computes b * exp_avg + (1 - b) * gradient, which becomes
    p.grad + decay * p. Where everything was sent, that is done by a gradient that makes it so: the mean gradient, by
    which the second moment is what it would be, too. Elsewhere such a difference of two totals would be of other
    entries in each step. There the first moment is set, and the second moment is of that.

    Args:
        state: Adam's state of the parameter; without ``exp_avg`` that begins with 0.
        p: The parameter.
        group: Its group.
        decay: As of ``coupled_decay``. It has no momentum: parameters hardly change while that lasts.
        sent_whole: Whether everything was sent in this step.
    """
    gradient, first, beta = p.grad, state.get("exp_avg"), float(group["betas"][0])
    uphill = -1 if group.get("maximize") else 1
    assert gradient is not None
    gradient.add_(p, alpha=decay)
    if first is not None and not sent_whole:
        torch.mul(gradient, uphill, out=first)
    else:
        if first is not None:
            gradient.sub_(first, alpha=uphill * beta)
        gradient.div_(1 - beta)
    gradient.sub_(p, alpha=decay)

"""Momentum of torch's optimizers: what a compression takes over of it, and how their own step goes on without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from horovod_sparse.rules import Momentum


def momentum_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Momentum:
    """The momentum of a param group in this step, as far as a compression can take it over.

    SGD's, and the first moment of Adam and AdamW: (1 - beta) * u. Other optimizers' are not linear in the gradients, or
    unknown: none.
    """
    if isinstance(optimizer, SGD):
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), float(group["dampening"]))
    if isinstance(optimizer, (Adam, AdamW)):
        return Momentum(float(group["betas"][0]))
    return Momentum()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Tells if ``momentum_of`` knows the momentum of an optimizer."""
    return isinstance(optimizer, (SGD, Adam, AdamW))


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Tells if an optimizer has momentum of its own."""
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Weight decay that is a part of the gradient, so that momentum is for it, too; negative where that is uphill."""
    coupled = isinstance(optimizer, SGD) or (isinstance(optimizer, Adam) and not isinstance(optimizer, AdamW))
    if not coupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])


def enter_first_moment(
    state: Mapping[str, Any], gradient: torch.Tensor, group: Mapping[str, Any], sent_whole: bool
) -> None:
    """Lets Adam's step find its first moment in a total that has momentum already; both are changed in place.

    The step computes exp_avg = b exp_avg + (1 - b) gradient, which becomes (1 - b) total either way. Where everything
    was sent, the gradient that makes it so is the mean gradient itself, and Adam's second moment is what it would be.
    Elsewhere that difference of two totals would be of other entries in each step; there the second moment is that of
    the first moment, in which what has waited for long is as large as (1 - b) of its sum.

    Args:
        state: Adam's state of the parameter. Without ``exp_avg``, which then begins with 0, nothing is done.
        gradient: The total.
        group: The parameter's group.
        sent_whole: Whether everything was sent in this step.
    """
    first, beta = state.get("exp_avg"), float(group["betas"][0])
    if first is None:
        return
    uphill = -1 if group.get("maximize") else 1
    if sent_whole:
        gradient.sub_(first, alpha=uphill * beta / (1 - beta))
    else:
        gradient.mul_(1 - beta)
        torch.mul(gradient, uphill, out=first)

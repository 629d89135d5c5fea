"""Momentum and weight decay of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from horovod_sparse.rules import Momentum

MUON: Any = getattr(torch.optim, "Muon", ())  # since torch 2.9


def momentum_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Momentum:
    """Return the momentum of a param group that a memory can apply before the selection; none if it is not known.

    This is the momentum of SGD and Muon and the first moment of Adam and AdamW. The momentum of other optimizers is not
    known to be linear in the gradients.
    """
    if not is_known(optimizer):
        return Momentum()
    adam = isinstance(optimizer, (Adam, AdamW))
    factor = float(group["betas"][0] if adam else group["momentum"])
    begun = factor != 0 and any(buffer_name(optimizer) in optimizer.state.get(p, {}) for p in group["params"])
    if not isinstance(optimizer, SGD):
        return Momentum(factor, not adam and bool(group["nesterov"]), 1 - factor, averages=True, begun=begun)
    share = 1 - float(group["dampening"])
    # With a dampening of 1 the optimizer ignores all gradients but the first.
    return Momentum(factor, bool(group["nesterov"]), share, begun=begun) if share else Momentum()


def buffer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the key of the momentum in the optimizer's state of a parameter."""
    return "exp_avg" if isinstance(optimizer, (Adam, AdamW)) else "momentum_buffer"


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``momentum_of`` knows the momentum of an optimizer."""
    return isinstance(optimizer, (SGD, MUON, Adam, AdamW))


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer applies momentum."""
    return any(map(applies_momentum, optimizer.param_groups))


def applies_momentum(group: Mapping[str, Any]) -> bool:
    """Return whether the settings of a param group include momentum."""
    return bool(group.get("momentum") or group.get("betas", (0,))[0])


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the weight decay that SGD and Adam add to the gradient; negative where ``p.grad`` points uphill."""
    coupled = isinstance(optimizer, (SGD, Adam)) and not isinstance(optimizer, AdamW)
    if not coupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])

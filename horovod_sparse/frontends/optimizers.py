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
    if isinstance(optimizer, SGD):
        share = 1 - float(group["dampening"])
        if not share:  # the optimizer ignores all gradients but the first
            return Momentum()
        # It does not dampen the gradient that starts the momentum buffer.
        begun = share == 1 or any("momentum_buffer" in optimizer.state.get(p, {}) for p in group["params"])
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), share, share if begun else 1.0)
    if isinstance(optimizer, MUON):
        factor = float(group["momentum"])
        return Momentum(factor, bool(group["nesterov"]), 1 - factor, 1 - factor, averages=True)
    if isinstance(optimizer, (Adam, AdamW)):
        beta = float(group["betas"][0])
        return Momentum(beta, share=1 - beta, first=1 - beta, averages=True)
    return Momentum()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``momentum_of`` knows the momentum of an optimizer."""
    return isinstance(optimizer, (SGD, MUON, Adam, AdamW))


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer applies momentum."""
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the weight decay that SGD and Adam add to the gradient; negative where ``p.grad`` points uphill."""
    coupled = isinstance(optimizer, (SGD, Adam)) and not isinstance(optimizer, AdamW)
    if not coupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])

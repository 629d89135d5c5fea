"""Unit of the residuals: updates for SGD-like optimizers, gradients for optimizers that normalize their scale."""

from __future__ import annotations

import logging
from typing import Any

import torch

from horovod_sparse.frontends.optimizers import torch_class

_LOG = logging.getLogger("horovod_sparse")
UPDATE, GRADIENT = "update", "gradient"
# Classes in torch.optim, and their subclasses without a step of their own.
_UPDATE = ("SGD", "ASGD", "LBFGS")
_GRADIENT = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)


def check_unit(unit: Any) -> None:
    """Raise ValueError unless the argument is a unit or None."""
    if unit not in (None, UPDATE, GRADIENT):
        raise ValueError(
            f"residual_unit must be 'update', 'gradient' or None, not {unit!r}: None decides by the optimizer's class"
        )


def known_unit(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the unit for an optimizer that takes steps of torch; None for others."""
    name = getattr(torch_class(optimizer), "__name__", None)
    return UPDATE if name in _UPDATE else GRADIENT if name in _GRADIENT else None


def unit_for(optimizer: torch.optim.Optimizer, chosen: str | None = None) -> str:
    """Return the unit of the residuals for an optimizer.

    Args:
        optimizer: The optimizer. An unknown class with ``betas`` or ``eps`` counts as scale-free: it probably divides
            by an average of earlier gradients, as LAMB does.
        chosen: The user's choice; None: by class.
    """
    divides = any("betas" in group or "eps" in group for group in optimizer.param_groups)
    return chosen or known_unit(optimizer) or (GRADIENT if divides else UPDATE)


class ResidualUnits:
    """Units of the residuals of one exchange; warns when a guessed unit starts to matter.

    Args:
        chosen: The user's choice for all param groups; None: by the classes of the optimizers.
        rank: Rank of this process; rank 0 warns.
    """

    def __init__(self, chosen: str | None, rank: int) -> None:
        self._chosen = chosen
        self._silent = chosen is not None or rank != 0
        self._rates: dict[int, float] = {}

    def scale_free(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether residuals count as gradients, not as updates."""
        return unit_for(optimizer, self._chosen) == GRADIENT

    def note(self, optimizer: torch.optim.Optimizer, group: int, rate: float) -> None:
        """Warn once if the learning rate of a param group changes and the unit was only guessed."""
        if self._silent or known_unit(optimizer) is not None or self._rates.setdefault(group, rate) == rate:
            return
        self._silent = True
        _LOG.warning(
            "rank 0: the learning rate changes, and residuals are kept in %s units, a guess for the optimizer %s: set "
            "residual_unit='gradient' if its steps do not depend on the scale of the gradients (as with Adam), "
            "residual_unit='update' if they do (as with SGD)",
            unit_for(optimizer),
            type(optimizer).__name__,
        )

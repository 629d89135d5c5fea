"""Unit of the residuals: updates for optimizers that multiply gradients, gradients for those that are scale-free."""

from __future__ import annotations

import logging
from typing import Any

import torch

_LOG = logging.getLogger("horovod_sparse")
UPDATE, GRADIENT = "update", "gradient"
# Of torch.optim. Subclasses count; some are missing in some versions of torch.
_KNOWN = {
    UPDATE: ("SGD", "ASGD", "LBFGS"),
    GRADIENT: (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
        "SparseAdam",
    ),
}


def check_unit(unit: Any) -> None:
    """ValueError unless it is a unit, or None."""
    if unit not in (None, UPDATE, GRADIENT):
        raise ValueError(
            f"residual_unit must be 'update', 'gradient' or None, not {unit!r}: None decides by the optimizer's class"
        )


def known_unit(optimizer: torch.optim.Optimizer) -> str | None:
    """The unit that suits an optimizer of torch's; None for another class."""
    for unit, names in _KNOWN.items():
        if isinstance(optimizer, tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))):
            return unit
    return None


def unit_for(optimizer: torch.optim.Optimizer, chosen: str | None = None) -> str:
    """The unit that the residuals for an optimizer have.

    Args:
        optimizer: It. One of an unknown class with ``betas`` or ``eps`` is taken for scale-free: it divides by a mean
            of what gradients were, as LAMB does.
        chosen: By the user.
    """
    divides = any("betas" in group or "eps" in group for group in optimizer.param_groups)
    return chosen or known_unit(optimizer) or (GRADIENT if divides else UPDATE)


class ResidualUnits:
    """Units of the residuals of one exchange; says when one that was guessed begins to matter.

    Args:
        chosen: By the user, for all param groups; None: by the optimizers' classes.
        rank: Rank 0 says it.
    """

    def __init__(self, chosen: str | None, rank: int) -> None:
        self._chosen = chosen
        self._silent = chosen is not None or rank != 0
        self._rates: dict[int, float] = {}

    def scale_free(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells if residuals count as gradients, not as updates."""
        return unit_for(optimizer, self._chosen) == GRADIENT

    def note(self, optimizer: torch.optim.Optimizer, group: int, rate: float) -> None:
        """Warns, once, where the learning rate of a param group changes and nobody has said which unit is right."""
        if self._silent or known_unit(optimizer) is not None or self._rates.setdefault(group, rate) == rate:
            return
        self._silent = True
        _LOG.warning(
            "rank 0: the learning rate changes, and residuals stay the same as %ss, since %s looks like an optimizer "
            "for which that is right: give residual_unit='gradient' if its steps do not depend on the gradients' scale "
            "(as Adam's), residual_unit='update' if they do (as SGD's)",
            unit_for(optimizer),
            type(optimizer).__name__,
        )

"""Clipping of this rank's gradients by their norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


@torch.no_grad()
def clip(gradients: Sequence[torch.Tensor], factor_for: Callable[[float], float], loss_scale: float = 1.0) -> None:
    """Multiply gradients in place by a factor that depends on their total norm.

    Args:
        gradients: Gradients of this rank, dense or sparse, on any devices.
        factor_for: Returns the factor for a norm without the loss scale.
        loss_scale: Factor that a GradScaler put on the gradients.
    """
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(value, dtype=torch.float64).cpu() for value in values]
    norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    factor = factor_for(norm / loss_scale)
    if factor != 1:
        for gradient in gradients:
            gradient.data.mul_(factor)  # not counted in its version, which detects changes by the user

"""Clipping of this rank's gradients by their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from horovod_sparse.engine.device import real_view


@torch.no_grad()
def clip(gradients: Sequence[torch.Tensor], factor_for: Callable[[float], float], loss_scale: float = 1.0) -> None:
    """Multiply gradients in place by a factor that depends on their total norm.

    Args:
        gradients: Gradients of this rank, dense or sparse, on any devices.
        factor_for: Returns the factor for a norm without the loss scale.
        loss_scale: Factor that a GradScaler put on the gradients.
    """
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = real_view(gradient.coalesce().values() if gradient.is_sparse else gradient)
        # Squares of 16-bit values would overflow.
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        norms.setdefault(values.device, []).append(torch.linalg.vector_norm(values, dtype=dtype).double())
    norm = math.hypot(*(float(torch.linalg.vector_norm(torch.stack(on_device))) for on_device in norms.values()))
    factor = factor_for(norm / loss_scale)
    if factor != 1:
        for gradient in gradients:
            # Not counted in the version of the gradient, which detects changes by the user.
            (gradient._values() if gradient.is_sparse else gradient.data).mul_(factor)

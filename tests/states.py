"""Comparison of states returned by ``state_dict``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from laws import digest


def same(ours: Any, expected: Any) -> bool:
    """Return whether nested states have the same bits, apart from times."""
    if isinstance(expected, dict):
        return ours.keys() == expected.keys() and all(
            same(ours[key], expected[key]) for key in expected if key not in ("seconds", "seen")
        )
    if isinstance(expected, (list, tuple)):
        return len(ours) == len(expected) and all(map(same, ours, expected))
    if isinstance(expected, torch.Tensor):
        return ours.dtype == expected.dtype and ours.shape == expected.shape and torch.equal(ours, expected)
    if isinstance(expected, np.ndarray):
        return digest(ours) == digest(expected)
    return bool(ours == expected or (ours != ours and expected != expected))  # NaN

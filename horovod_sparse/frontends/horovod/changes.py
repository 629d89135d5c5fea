"""Gradients that a script has changed while they were exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def changed(submitted: Mapping[torch.Tensor, tuple[Any, Any]]) -> list[torch.Tensor]:
    """Return the parameters whose gradients were changed in place, or replaced, since they were submitted.

    Torch counts changes per memory: views of a flat buffer share a counter, which backward() raises for each of them.
    A change of such gradients is noticed if it comes after the last of them was submitted, and if they fill the buffer;
    other changes may be those of other tensors in it.

    Args:
        submitted: Gradient and version at that time, by parameter. Other handles than tensors are Horovod's.
    """
    mine = {p: pair for p, pair in submitted.items() if isinstance(pair[0], torch.Tensor)}
    suspects = [p for p, (gradient, version) in mine.items() if gradient._version != version or p.grad is not gradient]
    if not suspects:  # as in most steps; what follows takes longer
        return []
    latest: dict[int, int] = {}  # version of a memory
    others: dict[int, int] = {}  # bytes of a memory outside of the gradients
    for gradient, version in mine.values():
        memory, nbytes = _memory(gradient)
        latest[memory] = max(version, latest.get(memory, version))
        others[memory] = others.get(memory, nbytes) - gradient.nbytes if nbytes else 0

    def is_changed(p: torch.Tensor) -> bool:
        gradient = mine[p][0]
        memory, _ = _memory(gradient)
        return (others[memory] <= 0 and gradient._version > latest[memory]) or p.grad is not gradient

    return [p for p in suspects if is_changed(p)]


def _memory(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the identity and the bytes of a gradient's memory; 0 bytes for a sparse gradient, which shares none."""
    if gradient.layout is not torch.strided:
        return id(gradient), 0
    storage = gradient.untyped_storage()
    return storage._cdata, storage.nbytes()

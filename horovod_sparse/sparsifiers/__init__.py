"""Sparsifiers choose what travels, one file per rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.vector import Array, SparseVector

# Sums a small array over the ranks, so that all of them can decide alike; the identity on one rank.
Consensus: TypeAlias = Callable[[Array], Array]


class Sparsifier(Protocol):
    """One bucket's rule of selection.

    Law: acc before = acc after + vector. The entries taken leave the accumulator.
    """

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves about k entries out of the accumulator."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


SPARSIFIERS: dict[str, type[Sparsifier]] = {"topk": TopK}

__all__ = ["SPARSIFIERS", "Consensus", "Sparsifier", "TopK"]

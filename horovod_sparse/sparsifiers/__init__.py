"""Sparsifiers choose what travels, one file per rule."""

from __future__ import annotations

from typing import Any, Protocol

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.sparsifiers.consensus import Consensus
from horovod_sparse.sparsifiers.randomblock import RandomBlock
from horovod_sparse.sparsifiers.reusedtopk import ReusedTopK
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.vector import SparseVector


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


SPARSIFIERS: dict[str, type[Sparsifier]] = {"topk": TopK, "reusedtopk": ReusedTopK, "randomblock": RandomBlock}

__all__ = ["SPARSIFIERS", "Consensus", "RandomBlock", "ReusedTopK", "Sparsifier", "TopK"]

"""Collectives sum sparse vectors over the ranks, one file per algorithm."""

from __future__ import annotations

from typing import Any, Protocol

from horovod_sparse.collectives.dense import Dense
from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.vector import SparseVector


class Collective(Protocol):
    """One bucket's sparse allreduce, on an explicit communicator.

    Law: the vectors summed over the ranks = total + the returned vectors summed over the ranks, and total has
    the same bits on every rank and in every run. All ranks call it in the same order; a vector without indices
    (a dense step) is one on every rank or on none.

    Attributes:
        traffic: What this rank has sent so far.
    """

    traffic: Traffic

    def allreduce(self, vector: SparseVector) -> Exchange:
        """Sums the ranks' vectors; ``vector`` itself is not changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


COLLECTIVES: dict[str, type[Collective]] = {"topka": TopkA, "dense": Dense}

__all__ = ["COLLECTIVES", "Collective", "Dense", "Exchange", "TopkA", "Traffic"]

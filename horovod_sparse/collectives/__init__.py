"""Collectives sum sparse vectors over the ranks; one file per algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from horovod_sparse.collectives.auto import Auto
from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.dense import Dense
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.hierarchical import Hierarchical
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.scatter import ReduceScatter
from horovod_sparse.collectives.shared import SharedIndices
from horovod_sparse.collectives.spardl import SparDL
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.collectives.union import Union
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector, Stateful
from horovod_sparse.rules.registry import Registry

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport
    from horovod_sparse.transport.traffic import Traffic


class Collective(Stateful, Protocol):
    """Sparse allreduce of one bucket, built from the bucket's context, a transport and the algorithm's options.

    Invariant: the vectors summed over the ranks = total + the returned vectors summed over the ranks. ``total`` has the
    same bits on every rank and in every run. All ranks make the same calls in the same order, and either all or none of
    them pass a vector without indices (a dense step).
    """

    def __init__(self, context: BucketContext, transport: Transport, options: Any) -> None: ...

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far."""

    def decide(self, size: int, k: int) -> bool:
        """Decide how to exchange k of ``size`` entries; called before the selection, once in every sparse step.

        Returns:
            Whether all ranks should send all entries instead, as a vector without indices.
        """

    def extend(self, accumulator: Accumulator, vector: SparseVector, k: int) -> SparseVector:
        """Return the vector to sum: the selected entries and any others that the algorithm sends.

        Called after the selection and before ``allreduce``, on all ranks. Invariant: accumulator + vector is unchanged.

        Args:
            accumulator: Accumulator after the selection; further entries are moved out of it.
            vector: Selected vector of this rank; one without indices is returned unchanged.
            k: Number of entries of the total; see ``allreduce``.
        """

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the ranks' vectors.

        Args:
            vector: Vector of this rank, from ``extend``; not changed.
            k: Number of entries of the total, if the algorithm limits it; the same on every rank.
        """


class Owning(Collective, Protocol):
    """Collective whose ranks own the sums of a region, and keep in their residual what the total leaves out.

    Error feedback on both sides, as in DoubleSqueeze (Tang et al., ICML 2019), without a second residual: all that a
    rank holds of its region enters the sums without a message, so that nothing has to be selected there.
    """

    def region(self, size: int) -> tuple[int, int] | None:
        """Return begin and end of the positions whose sums this rank owns in this step; None: it owns none.

        Called after ``decide``, and before anything is selected. None stands for ``allreduce``.
        """

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Reduced:
        """Sum the ranks' vectors, and what the owners hold.

        Invariant: the vectors summed over the ranks = total + the returned vectors summed over the ranks. In the region
        of a rank, its returned vector is what has to be added to what it holds: what arrived, less what is in the
        total.

        Args:
            vector: Vector of this rank with indices, from ``extend``; not changed.
            k: Number of entries that each rank selects; the same on every rank.
            own: What this rank holds of its region, with positions from the region's begin; not changed. Where it has
                gaps, only positions that other ranks send are summed.
        """


COLLECTIVES = Registry(
    "collective", Collective, [TopkA, TopkDSA, GTopk, OkTopk, SparDL, SharedIndices, Union, Hierarchical, Auto, Dense]
)

__all__ = [
    "COLLECTIVES",
    "Auto",
    "Base",
    "Collective",
    "Dense",
    "GTopk",
    "Hierarchical",
    "OkTopk",
    "Owning",
    "ReduceScatter",
    "Reduced",
    "SharedIndices",
    "SparDL",
    "TopkA",
    "TopkDSA",
    "Union",
]

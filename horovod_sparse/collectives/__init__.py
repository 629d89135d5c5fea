"""Collectives sum sparse vectors over the ranks, one file per algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from mpi4py import MPI

from horovod_sparse.collectives.auto import Auto
from horovod_sparse.collectives.dense import Dense
from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.hierarchical import Hierarchical
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.shared import SharedIndices
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.kernels.types import Array
from horovod_sparse.vector import SparseVector


class Collective(Protocol):
    """One bucket's sparse allreduce, on an explicit communicator.

    Law: the vectors summed over the ranks = total + the returned vectors summed over the ranks, and total has
    the same bits on every rank and in every run. All ranks call it in the same order; a vector without indices
    (a dense step) is one on every rank or on none.
    """

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        ...

    def entries(self, size: int, k: int) -> int:
        """How many entries a rank should hand in: k, or all of ``size`` for a dense step. Called once a step."""
        ...

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors; ``vector`` itself is not changed.

        Args:
            vector: This rank's vector.
            k: Entries that the total has, where the algorithm limits them; the same on every rank.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on. Arrays are not copied: see ``snapshot``."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


COLLECTIVES: dict[str, type[Collective]] = {
    "topka": TopkA,
    "topkdsa": TopkDSA,
    "gtopk": GTopk,
    "oktopk": OkTopk,
    "shared": SharedIndices,
    "hierarchical": Hierarchical,
    "auto": Auto,
    "dense": Dense,
}


def make(name: str, comm: MPI.Intracomm, options: Mapping[str, Any], like: Array | None = None) -> Collective:
    """A collective by name.

    Args:
        name: A key of COLLECTIVES.
        comm: The communicator of the ranks that take part.
        options: Keyword options; those that this collective does not know are for others.
        like: Array whose dtype and device those of the bucket are, for a collective that measures; None: float32 on
            the host.
    """
    kind = COLLECTIVES[name]
    known = keywords(kind)
    given = {key: value for key, value in options.items() if key in known}
    if like is not None and "like" in inspect.signature(kind).parameters:
        given["like"] = like
    return kind(comm, **given)  # type: ignore[call-arg]


def keywords(kind: type[Any]) -> set[str]:
    """The keyword options of a class; those of all collectives for one that passes them on."""
    passes_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(kind).parameters.values())
    kinds = [kind, *COLLECTIVES.values()] if passes_on else [kind]
    parameters = [one for each in kinds for one in inspect.signature(each).parameters.values()]
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


__all__ = [
    "COLLECTIVES",
    "Auto",
    "Collective",
    "Dense",
    "Exchange",
    "GTopk",
    "Hierarchical",
    "OkTopk",
    "SharedIndices",
    "TopkA",
    "TopkDSA",
    "Traffic",
    "keywords",
    "make",
]

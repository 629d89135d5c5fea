"""Sparsifiers choose what travels, one file per rule."""

from __future__ import annotations

from typing import Any, Protocol

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.sparsifiers.dgc import DGCSampling
from horovod_sparse.sparsifiers.gaussiank import GaussianK
from horovod_sparse.sparsifiers.multilevel import MultiLevel
from horovod_sparse.sparsifiers.randomblock import RandomBlock
from horovod_sparse.sparsifiers.randomk import RandomK
from horovod_sparse.sparsifiers.redsync import RedSync
from horovod_sparse.sparsifiers.reusedtopk import ReusedTopK
from horovod_sparse.sparsifiers.stable import StableTopK
from horovod_sparse.sparsifiers.threshold import Threshold
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.vector import SparseVector


class Sparsifier(Protocol):
    """One bucket's rule of selection; built from its place and the configuration's options.

    Law: acc before = acc after + vector. The entries taken leave the accumulator.

    Attributes:
        Options: Nested dataclass of its options.
        shares_indices: Tells that all ranks choose the same positions, so that only values need to travel.
        replicated: Tells that the state is the same on every rank, so that another number of ranks can take it over.
        narrows: Tells that a part of a vector can be sent alone.
    """

    shares_indices: bool
    replicated: bool
    narrows: bool

    def __init__(self, context: BucketContext, options: Any) -> None: ...

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves about k entries out of the accumulator, in a step that is the same on every rank."""
        ...

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """About k entries of a vector that was taken in the same step; asked for only where it ``narrows``.

        Ranks that share the indices of the vector share those of its part.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on. Arrays are not copied: see ``rules.snapshot``."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


SPARSIFIERS = Registry(
    "sparsifier",
    Sparsifier,
    {
        "topk": TopK,
        "reusedtopk": ReusedTopK,
        "randomblock": RandomBlock,
        "randomk": RandomK,
        "threshold": Threshold,
        "gaussiank": GaussianK,
        "dgc": DGCSampling,
        "redsync": RedSync,
        "stable": StableTopK,
        "multilevel": MultiLevel,
    },
)

__all__ = [
    "SPARSIFIERS",
    "Base",
    "DGCSampling",
    "GaussianK",
    "MultiLevel",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "ReusedTopK",
    "Sparsifier",
    "StableTopK",
    "Threshold",
    "TopK",
]

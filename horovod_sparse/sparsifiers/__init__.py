"""Sparsifiers select the entries to send; one file per rule."""

from __future__ import annotations

from typing import Any, Protocol

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Stateful, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.sparsifiers.arctopk import ARCTopK
from horovod_sparse.sparsifiers.artopk import ARTopK
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.sparsifiers.chunked import ChunkedTopK
from horovod_sparse.sparsifiers.deft import DEFT
from horovod_sparse.sparsifiers.dgc import DGCSampling
from horovod_sparse.sparsifiers.exdyna import ExDyna
from horovod_sparse.sparsifiers.gaussiank import GaussianK
from horovod_sparse.sparsifiers.micro import MiCRO
from horovod_sparse.sparsifiers.multilevel import MultiLevel
from horovod_sparse.sparsifiers.randomblock import RandomBlock
from horovod_sparse.sparsifiers.randomk import RandomK
from horovod_sparse.sparsifiers.redsync import RedSync
from horovod_sparse.sparsifiers.reusedtopk import ReusedTopK
from horovod_sparse.sparsifiers.sidco import SIDCo
from horovod_sparse.sparsifiers.stable import StableTopK
from horovod_sparse.sparsifiers.threshold import Threshold
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.vector import SparseVector


class Sparsifier(Stateful, Protocol):
    """Selection rule of one bucket, built from the bucket's context and the rule's options.

    Invariant: acc before = acc after + vector. Selected entries leave the accumulator.

    Attributes:
        Options: Nested dataclass of the rule's options.
        shares_indices: Whether all ranks select the same positions, so that only values need to be sent.
        replicated: Whether the state is the same on every rank, so that it can be loaded with another world size.
        narrows: Whether ``narrow`` can reduce a vector to fewer entries.
    """

    shares_indices: bool
    replicated: bool
    narrows: bool

    def __init__(self, context: BucketContext, options: Any) -> None: ...

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k entries out of the accumulator; all ranks call this in the same step."""

    def observe(self, total: SparseVector) -> None:
        """Take note of the total of a step, which is the same on every rank; called after every exchange.

        A total without indices may come from a step in which everything was sent.
        """

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """Return about k entries of a vector that was taken in the same step; called only if ``narrows`` is true.

        Ranks with the same indices in the vector get the same indices in the result.
        """


SPARSIFIERS = Registry(
    "sparsifier",
    Sparsifier,
    [
        TopK,
        ChunkedTopK,
        ReusedTopK,
        RandomBlock,
        RandomK,
        Threshold,
        GaussianK,
        DGCSampling,
        RedSync,
        SIDCo,
        StableTopK,
        MultiLevel,
        MiCRO,
        ExDyna,
        DEFT,
        ARTopK,
        ARCTopK,
    ],
)

__all__ = [
    "DEFT",
    "SPARSIFIERS",
    "ARCTopK",
    "ARTopK",
    "Base",
    "ChunkedTopK",
    "DGCSampling",
    "ExDyna",
    "GaussianK",
    "MiCRO",
    "MultiLevel",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "ReusedTopK",
    "SIDCo",
    "Sparsifier",
    "StableTopK",
    "Threshold",
    "TopK",
]

"""Exact top-k: sends the k largest magnitudes (Aji and Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class TopK(Fused):
    """Selects exactly the k largest magnitudes; ties go to the lower index."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the k largest magnitudes out of the accumulator, or all if there are fewer than k."""
        del step
        return accumulator.take_largest(k, self._threads)

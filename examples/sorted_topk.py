"""Custom sparsifier: top-k with torch.topk, as in most published measurements of top-k.

    horovodrun -np 4 python examples/train.py --rules sorted_topk --compression topka:density=0.001,sparsifier=sorttopk

It is a baseline for ``topk`` and selects the same entries, except for ties. Accumulation, magnitudes and selection are
separate passes over memory here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import horovod_sparse as hvs
from horovod_sparse.rules import Accumulator, RuleOptions, SparseVector, Step
from horovod_sparse.sparsifiers import Base


@hvs.register("sparsifier", "sorttopk")
class SortedTopK(Base):
    """Sparsifier that selects exactly the k largest magnitudes; torch breaks ties."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """No options."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the k largest magnitudes out of the accumulator, or all if there are fewer than k."""
        del step
        buffer: Any = accumulator.settle()  # NumPy or CuPy array; a tensor made from it shares its memory
        magnitudes = torch.full_like(torch.as_tensor(buffer), -1.0)  # below every active magnitude
        for start, part in accumulator.active():
            torch.abs(torch.as_tensor(part), out=magnitudes[start : start + part.size])
        largest = torch.topk(magnitudes, min(k, accumulator.active_size), sorted=False).indices
        positions = largest.int().sort().values
        return accumulator.take_at(np.asarray(positions, like=buffer), shared=False)

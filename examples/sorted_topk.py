"""A sparsifier of one's own: the k largest magnitudes by torch.topk, as most published measurements of top-k have it.

    horovodrun -np 4 python examples/train.py --rules sorted_topk --compression topka:density=0.001,sparsifier=sorttopk

It selects what ``topk`` selects, but for ties, and is what ``topk`` is compared with: to add up, to take magnitudes and
to select are passes over memory of their own here.
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
    """Takes exactly the k largest magnitudes; torch decides between equal ones."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """It has none."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves the k largest magnitudes out of the accumulator, or all where there are fewer than k."""
        del step
        buffer: Any = accumulator.settle()  # of NumPy or CuPy; a tensor of it lies in the same memory
        magnitudes = torch.full_like(torch.as_tensor(buffer), -1.0)  # which nothing that takes part in the step has
        for start, part in accumulator.active():
            torch.abs(torch.as_tensor(part), out=magnitudes[start : start + part.size])
        largest = torch.topk(magnitudes, min(k, accumulator.active_size), sorted=False).indices
        positions = largest.int().sort().values
        return accumulator.take_at(np.asarray(positions, like=buffer), shared=False)

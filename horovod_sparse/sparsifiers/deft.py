"""DEFT: k is divided among the layers by their norms, and the layers among the ranks (Yoon and Oh, ICPP 2023)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class DEFT(Fused):
    """Selects the largest magnitudes in some layers of the bucket, k on all ranks together.

    A layer is a parameter; one with more than n/P elements is divided into P. Each layer gets a share of k proportional
    to its norm, the root of the squared norms summed over the ranks. The layers are packed into P bins of about equal
    cost, where selecting k of n elements costs n log2(k). In step t, rank r selects in bin (t + r) mod P. Made for the
    collective ``union``, which sums all ranks' values at the selected positions.

    The authors' ranks each take their own norms, and one of them packs and broadcasts the bins.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def __init__(self, context: BucketContext, options: Any) -> None:
        super().__init__(context, options)
        self._cuts = _divided([*context.layers, context.size], context.ranks)

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move this rank's share of k entries out of the accumulator."""
        layers = [accumulator.part(begin, end) for begin, end in itertools.pairwise(self._cuts)]
        norms = np.sqrt(self._context.consensus(np.array([_square_norm(layer) for layer in layers])))
        sizes = np.diff(self._cuts).tolist()
        shares = _shares(norms, sizes, k)
        bins = _packed(
            [size * math.log2(max(share, 2)) for size, share in zip(sizes, shares, strict=True)], self._context.ranks
        )
        own = bins[(step.number + self._context.rank) % self._context.ranks]
        vectors = [layers[layer].take_largest(shares[layer], self._threads) for layer in sorted(own)]
        indices = [np.empty_like(accumulator.buffer, shape=(0,), dtype=np.int32), *(v.entries[0] for v in vectors)]
        values = [accumulator.buffer[:0], *(vector.values for vector in vectors)]
        return SparseVector(np.concatenate(indices), np.concatenate(values), accumulator.size)


def _divided(cuts: Sequence[int], ranks: int) -> list[int]:
    """Return the boundaries of the layers, after those with more than n/P elements have been divided into P."""
    most = cuts[-1] / ranks
    parts = [ranks if end - begin > most else 1 for begin, end in itertools.pairwise(cuts)]
    inner = [
        begin + part * (end - begin) // count
        for (begin, end), count in zip(itertools.pairwise(cuts), parts, strict=True)
        for part in range(count)
    ]
    return [*inner, cuts[-1]]


def _square_norm(layer: Accumulator) -> float:
    active = layer.active()
    return float(kernels_for(layer.buffer).square_norm(active)) if active else 0.0


def _shares(norms: NDArray[np.float64], sizes: Sequence[int], k: int) -> list[int]:
    """Divide k among layers in proportion to their norms, largest first; a layer gets at least 1 while there are any.

    What exceeds the size of a layer goes to the others. If a norm is not finite, sizes take their place.
    """
    weights = norms if np.isfinite(norms).all() else np.array(sizes, np.float64)
    order = np.argsort(-weights, kind="stable").tolist()
    shares, left, rest = [0] * len(sizes), k, float(weights.sum())
    for layer in order:
        weight = float(weights[layer])
        wanted = int(left * min(weight / rest, 1.0)) if rest > 0 else 0
        shares[layer] = min(max(wanted, 1), left, sizes[layer])
        left, rest = left - shares[layer], rest - weight
    for layer in order:
        more = min(left, sizes[layer] - shares[layer])
        shares[layer], left = shares[layer] + more, left - more
    return shares


def _packed(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the layers of each of P bins: the most expensive first, each into the bin that has cost least so far."""
    bins: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0.0] * ranks
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        cheapest = filled.index(min(filled))
        bins[cheapest].append(layer)
        filled[cheapest] += costs[layer]
    return bins

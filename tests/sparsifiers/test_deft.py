"""DEFT: layers with large norms send more, and each rank selects in some of the layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import check_steps
from rules import LIKE

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.sparsifiers.deft import _shares


def divided(starts, size, ranks):
    """Begin and end of each layer, of which large ones are divided."""
    layers = []
    for begin, end in zip(starts, [*starts[1:], size], strict=True):
        count = ranks if end - begin > size / ranks else 1
        layers += [
            (begin + part * (end - begin) // count, begin + (part + 1) * (end - begin) // count)
            for part in range(count)
        ]
    return layers


def published(acc, k, number, starts):
    """Masks of what each rank selects, as written down; acc has shape (ranks, elements)."""
    ranks, size = acc.shape
    layers = divided(starts, size, ranks)
    norms = [math.sqrt((acc[:, begin:end].astype(np.float64) ** 2).sum()) for begin, end in layers]
    shares, left, rest = {}, k, np.sum(norms)
    order = sorted(range(len(layers)), key=lambda layer: -norms[layer])
    for layer in order:
        size_ = layers[layer][1] - layers[layer][0]
        wanted = int(left * min(norms[layer] / rest, 1.0)) if rest > 0 else 0
        shares[layer] = min(max(1, wanted), left, size_)
        left, rest = left - shares[layer], rest - norms[layer]
    for layer in order:
        more = min(left, layers[layer][1] - layers[layer][0] - shares[layer])
        shares[layer], left = shares[layer] + more, left - more
    costs = {layer: (layers[layer][1] - layers[layer][0]) * math.log2(max(shares[layer], 2)) for layer in shares}
    bins, filled = [[] for _ in range(ranks)], [0.0] * ranks
    for layer in sorted(costs, key=lambda layer: (-costs[layer], layer)):
        cheapest = filled.index(min(filled))
        bins[cheapest].append(layer)
        filled[cheapest] += costs[layer]
    chosen = np.zeros(acc.shape, bool)
    for rank in range(ranks):
        for layer in bins[(number + rank) % ranks]:
            begin, end = layers[layer]
            largest = np.argsort(-np.abs(acc[rank, begin:end]), kind="stable")[: shares[layer]]
            chosen[rank, begin + largest] = True
    return chosen


@pytest.mark.law
@pytest.mark.parametrize(
    ("size", "density", "starts"), [(900, 0.05, (0, 30, 40, 700)), (64, 0.02, (0, 5)), (20, 0.4, (0,))]
)
def test_every_step_equals_the_reference(transport, size, density, starts):
    spec, k = Sparse.of(density, sparsifier="deft", collective="union"), max(1, round(density * size))
    pipeline = pipeline_for(spec, size, LIKE, transport, layers=starts)

    def select(accumulators, number):
        union = published(accumulators, k, number, starts).any(0)
        assert np.count_nonzero(union) == k
        return union

    check_steps(transport, pipeline, select, 8)


@settings(max_examples=60)
@given(
    norms=st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, math.inf, math.nan]), min_size=1, max_size=12),
    data=st.data(),
)
def test_the_shares_add_up_to_k_and_fit_the_layers(norms, data):
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(norms), max_size=len(norms)))
    k = data.draw(st.integers(1, sum(sizes)))
    shares = _shares(np.array(norms), sizes, k)
    assert sum(shares) == k
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_a_layer_gets_a_share_of_k_in_proportion_to_its_norm():
    assert _shares(np.array([1.0, 6.0, 3.0]), [1000, 1000, 1000], 100) == [10, 60, 30]
    assert _shares(np.array([1.0, 6.0, 3.0]), [1000, 20, 1000], 100) == [20, 20, 60]

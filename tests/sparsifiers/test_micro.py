"""MiCRO: a separate part of the bucket for each rank, and a common threshold."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, sum_bytes
from rules import LIKE, eighths, made, normal, take

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import BucketContext, Conditions
from horovod_sparse.sparsifiers import MiCRO
from horovod_sparse.vector import SparseVector


def total_of(count, size=1000):
    return SparseVector(np.arange(count, dtype=np.int32), np.ones(count, np.float32), size, shared=True)


def ready(k=100, size=1000):
    """A rule that has computed its threshold, and this threshold."""
    rule = made(MiCRO, size)
    take(rule, normal(0, size), k)
    return rule, rule.state_dict()["threshold"]


class Reference:
    """All ranks' steps, as written down, with union; arrays have shape (ranks, elements)."""

    def __init__(self, ranks, size):
        self.residual = np.zeros((ranks, size), np.float32)
        self.threshold, self.cuts = 0.0, [rank * size // ranks for rank in range(ranks + 1)]

    def step(self, number, gradients, k):
        self.residual += gradients
        ranks, chosen, smallest = len(gradients), set(), []
        for rank, acc in enumerate(self.residual):
            part = (number + rank) % ranks
            begin, end = self.cuts[part : part + 2]
            magnitudes = np.abs(acc[begin:end])
            if self.threshold:
                found = np.flatnonzero(magnitudes >= np.float32(self.threshold))
            else:
                share = (part + 1) * k // ranks - part * k // ranks
                found = np.argsort(-magnitudes, kind="stable")[:share]
                smallest += [float(magnitudes[found].min())] if len(found) else []
            chosen |= {begin + int(position) for position in found}
        self.threshold = self.threshold or sum(smallest) / len(smallest)
        ratio, positions = len(chosen) / k, sorted(chosen)
        self.threshold *= 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
        self.threshold *= 0.5 <= ratio <= 2
        total = np.zeros_like(gradients[0])
        total[positions] = self.residual[:, positions].sum(0)
        self.residual[:, positions] = 0
        return total


@pytest.mark.law
@pytest.mark.parametrize(("size", "density"), [(1200, 0.05), (50, 0.02), (7, 0.3)])
def test_every_step_equals_the_reference(transport, size, density):
    pipeline = pipeline_for(Sparse.of(density, sparsifier="micro", collective="union"), size, LIKE, transport)
    generator, reference, k = np.random.default_rng(5), Reference(transport.size, size), max(1, round(density * size))
    for number in range(25):
        gradients = eighths(generator, (transport.size, size), 1000)
        output = np.full(size, np.nan, np.float32)
        pipeline.run([(0, gradients[transport.rank].copy())], [(0, output)], Conditions())
        expected = reference.step(number, gradients, k)
        assert everywhere(transport, np.array_equal(output, expected)), number
        held = pipeline.state_dict()["memory"]["residual"]
        assert everywhere(transport, np.array_equal(held, reference.residual[transport.rank]))


@pytest.mark.law
def test_the_volume_and_the_positions_do_not_grow_with_the_ranks(transport):
    size, k, steps = 100_000, 9000, 60  # sums of so many values are not gathered
    spec = Sparse.of(k / size, sparsifier="micro", collective="union", indices="plain")
    pipeline, counts = pipeline_for(spec, size, LIKE, transport), []
    generator = np.random.default_rng(transport.rank)
    for number in range(steps):
        gradient = generator.standard_normal(size).astype(np.float32)
        pipeline.run([(0, gradient)], [(0, gradient)], Conditions())
        counts.append(np.count_nonzero(gradient))
        if number == steps // 2 - 1:
            pipeline.statistics(norms=False)
    mean, ranks = np.mean(counts[steps // 2 :]), transport.size
    assert 0.9 * k <= mean <= 1.8 * k
    sent = pipeline.statistics(norms=False).bytes_sent / (steps // 2)
    positions = 4 * mean * (ranks - 1) / ranks
    values = sum_bytes(transport, round(4 * mean))
    assert everywhere(transport, 0.9 * (values + positions) <= sent <= 1.2 * (values + positions)), (
        values,
        positions,
        sent,
    )


def test_each_rank_selects_in_each_part_in_turn_and_all_parts_are_covered():
    size, ranks, k = 1001, 3, 30
    for number in range(4):
        chosen = []
        for rank in range(ranks):
            vector, _ = take(made(MiCRO, BucketContext(size, LIKE, rank=rank, ranks=ranks)), normal(1, size), k, number)
            part = (number + rank) % ranks
            assert part * size // ranks <= vector.indices.min() <= vector.indices.max() < (part + 1) * size // ranks
            chosen.append(len(vector))
        assert chosen == [10, 10, 10]


@pytest.mark.parametrize(
    ("count", "factor"),
    [(100, 1.00125), (110, 1.00125), (111, 1.005), (91, 1.00125), (90, 0.995), (200, 1.005), (50, 0.995)],
)
def test_the_threshold_follows_the_number_of_entries(count, factor):
    rule, threshold = ready()
    rule.observe(total_of(count))
    assert rule.state_dict()["threshold"] == threshold * factor
    rule.observe(SparseVector.full(np.ones(1000, np.float32)))  # a dense step says nothing
    assert rule.state_dict()["threshold"] == threshold * factor


@pytest.mark.parametrize("count", [0, 49, 201, 1000])
def test_after_a_total_far_from_k_the_threshold_is_computed_again(count):
    rule, threshold = ready()
    rule.observe(total_of(count))
    assert len(take(rule, 5 * normal(0, 1000), 100)[0]) == 100
    assert rule.state_dict()["threshold"] == pytest.approx(5 * threshold, rel=1e-6)


def test_another_k_computes_the_threshold_again():
    rule, threshold = ready(k=100)
    assert len(take(rule, normal(0, 1000), 10)[0]) == 10
    assert rule.state_dict()["threshold"] > threshold


def test_the_first_threshold_is_the_mean_over_the_ranks_that_select():
    asked = []

    def consensus(array):
        asked.append(array.tolist())
        return array + np.array([6.0, 2.0])

    gradient = np.arange(1, 101, dtype=np.float32)
    context = BucketContext(100, LIKE, rank=3, ranks=4, consensus=consensus)
    rule = made(MiCRO, context)
    take(rule, gradient, 8)
    assert asked == [[99.0, 1.0]]
    assert rule.state_dict() == {"threshold": 35.0, "k": 8}
    assert len(take(made(MiCRO, context), gradient, 1, number=1)[0]) == 0  # the only position is another rank's
    assert asked[1] == [0.0, 0.0]


@pytest.mark.law
def test_gradients_that_grow_or_vanish_do_not_flood_or_starve_the_exchange(transport):
    size, k = 2000, 100
    pipeline = pipeline_for(Sparse.of(k / size, sparsifier="micro", collective="union"), size, LIKE, transport)
    generator, counts = np.random.default_rng(transport.rank), []
    for number in range(60):
        scale = (1, 1000, 1e-3, 0)[number // 15]
        gradient = (scale * generator.integers(-8, 9, size)).astype(np.float32)
        pipeline.run([(0, gradient)], [(0, gradient)], Conditions())
        counts.append(np.count_nonzero(gradient))
    assert max(np.median(counts[start : start + 15]) for start in range(0, 60, 15)) <= 2 * k
    assert min(counts[:30]) > 0

"""MiCRO: a separate part of the bucket for each rank, and a common threshold."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, sum_bytes
from pipelines import check_steps, run
from rules import LIKE, made, normal, take

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.sparsifiers import MiCRO
from horovod_sparse.vector import SparseVector


def total_of(count, size=1000):
    return SparseVector(np.arange(count, dtype=np.int32), np.ones(count, np.float32), size, shared=True)


def ready(k=100, size=1000):
    """A rule that has computed its threshold, and this threshold."""
    rule = made(MiCRO, size)
    take(rule, normal(0, size), k)
    return rule, rule.state_dict()["threshold"]


@pytest.mark.law
@pytest.mark.parametrize(("size", "density"), [(1200, 0.05), (50, 0.02), (7, 0.3)])
def test_every_step_equals_the_reference(transport, size, density):
    ranks, k, threshold = transport.size, max(1, round(density * size)), 0.0
    cuts = [rank * size // ranks for rank in range(ranks + 1)]

    def select(accumulators, number):
        nonlocal threshold
        chosen, smallest = np.zeros(size, bool), []
        for rank, acc in enumerate(accumulators):
            part = (number + rank) % ranks
            begin, end = cuts[part : part + 2]
            magnitudes = np.abs(acc[begin:end])
            if threshold:
                found = np.flatnonzero(magnitudes >= np.float32(threshold))
            else:
                found = np.argsort(-magnitudes, kind="stable")[: (part + 1) * k // ranks - part * k // ranks]
                smallest += [float(magnitudes[found].min())] if len(found) else []
            chosen[begin + found] = True
        threshold = threshold or sum(smallest) / len(smallest)
        ratio = np.count_nonzero(chosen) / k
        threshold *= 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995
        threshold *= 0.5 <= ratio <= 2
        return chosen

    pipeline = pipeline_for(Sparse.of(density, sparsifier="micro", collective="union"), size, LIKE, transport)
    check_steps(transport, pipeline, select, 25)


@pytest.mark.law
def test_the_volume_and_the_positions_do_not_grow_with_the_ranks(transport):
    size, k, steps = 100_000, 9000, 60  # sums of so many values are not gathered
    spec = Sparse.of(k / size, sparsifier="micro", collective="union", indices="plain")
    pipeline, counts = pipeline_for(spec, size, LIKE, transport), []
    generator = np.random.default_rng(transport.rank)
    for number in range(steps):
        gradient = generator.standard_normal(size).astype(np.float32)
        counts.append(np.count_nonzero(run(pipeline, gradient)))
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


@pytest.mark.law
def test_gradients_that_grow_or_vanish_do_not_flood_or_starve_the_exchange(transport):
    size, k = 2000, 100
    pipeline = pipeline_for(Sparse.of(k / size, sparsifier="micro", collective="union"), size, LIKE, transport)
    generator, counts = np.random.default_rng(transport.rank), []
    for number in range(60):
        scale = (1, 1000, 1e-3, 0)[number // 15]
        gradient = (scale * generator.integers(-8, 9, size)).astype(np.float32)
        counts.append(np.count_nonzero(run(pipeline, gradient)))
    assert max(np.median(counts[start : start + 15]) for start in range(0, 60, 15)) <= 2 * k
    assert min(counts[:30]) > 0

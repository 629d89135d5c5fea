"""Norms of a step on the device: those of the host."""

from __future__ import annotations

import numpy as np
import pytest
from devices import on_device, segments_on_device
from inputs import normal

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.rules import Step
from horovod_sparse.vector import SparseVector


def numbers(buffer, segments, returned):
    """Squares of a step that takes 50 entries, of which some come back, with one more that another rank had sent."""
    accumulator, counts = Accumulator(buffer, segments), Counts()
    norms = Norms(Step(loss_scale=2.0, gradients=segments))
    vector = accumulator.take_largest(50)
    norms.taken(accumulator, vector)
    norms.returned(accumulator, returned(vector, accumulator))
    assert norms.note(counts)
    return counts.gradient, counts.selected, counts.accumulated, counts.held


def test_norms_are_those_of_the_host():
    def returned(vector, accumulator):
        indices = np.concatenate([vector.indices[:5], vector.indices[-1:] + 1])
        values = np.concatenate([vector.values[:5], 3 + 0 * vector.values[:1]])
        return SparseVector(indices, values, vector.size)

    buffer, segments = normal(3001), [(3, normal(900, seed=1)), (1200, normal(1500, seed=2))]
    device = numbers(on_device(buffer), segments_on_device(segments), returned)
    gradient, selected, accumulated, held = numbers(buffer.copy(), segments, returned)
    assert device == pytest.approx((gradient, selected, accumulated, held))
    assert gradient == pytest.approx(sum(np.square(part, dtype=np.float64).sum() for _, part in segments) / 4)
    assert 0 < selected < accumulated
    assert accumulated - selected < held


def test_a_rank_without_gradients_has_norms_of_zero():
    empty = SparseVector.empty(10, np.zeros(0, np.float32))
    norms, counts = Norms(Step()), Counts()
    norms.taken(Accumulator(normal(10), []), empty)
    norms.returned(Accumulator(normal(10), []), empty)
    assert norms.note(counts)
    assert (counts.gradient, counts.accumulated, counts.held) == (0, 0, 0)

"""Accumulator on the device."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from devices import on_device, segments_on_device, to_host
from inputs import assert_same_bits, normal

from horovod_sparse.accumulator import Accumulator


@pytest.mark.parametrize("settled", [False, True])
def test_an_accumulator_on_the_device(settled: bool) -> None:
    """A settled accumulator behaves like a pending one; zeros split it into more tensors."""
    segments, buffer = [(3, normal(70_000)), (70_100, normal(500, seed=1))], normal(71_000, seed=2)
    expected = buffer.copy()
    accumulator = Accumulator(on_device(buffer), segments_on_device(segments), 0.5)
    sample = reference.sample(segments, buffer, 0.5, 7, 100)
    reference.accumulate(segments, expected, 0.5)
    if settled:
        accumulator.settle()
        segments = [
            (start + i, part[i : i + 2**16] * 0) for start, part in segments for i in range(0, len(part), 2**16)
        ]
    assert_same_bits(to_host(accumulator.sample(7, 100)), sample)
    moments = accumulator.moments()
    wanted = reference.accumulate_moments(segments, expected if settled else buffer, 1.0 if settled else 0.5)
    assert_same_bits(np.array(moments), np.array(wanted))
    counts = reference.count_reaching(segments, expected, np.array([2.0, 0.5])).tolist()
    assert accumulator.count_reaching([2.0, 0.5]) == counts
    assert accumulator.tail(0.5) == tuple(reference.tail(segments, expected, 0.5))
    assert_same_bits(to_host(accumulator.block_scores(64)), reference.block_scores(segments, expected, 64))
    assert_same_bits(to_host(accumulator.buffer), expected)

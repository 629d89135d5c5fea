"""Partial: a part of the error is fed back, the other one stays."""

from __future__ import annotations

import numpy as np
import pytest
from memories.errors import built, eighths, step

from horovod_sparse.memories import Contractive, Partial

SIZE = 400


@pytest.mark.parametrize("compressor", ["sketch", "quantize"])
def test_only_a_part_of_the_error_is_fed_back(compressor):
    gradient, nothing = eighths(np.random.default_rng(0), SIZE), np.empty(0, np.int32)
    fed = []
    for memory in (
        built(Contractive, SIZE, compressor=compressor),
        built(Partial, SIZE, compressor=compressor, beta=0.75),
        built(Partial, SIZE, compressor=compressor, beta=1.0),
    ):
        step(memory, gradient, nothing)
        fed.append(step(memory, np.zeros(SIZE, np.float32), nothing)[0])
    assert np.array_equal(fed[1], fed[0] / 4)
    assert fed[0].any()
    assert not fed[2].any()


@pytest.mark.parametrize("beta", [0.125, 0.5, 1.0])
def test_what_stays_behind_is_not_lost(beta):
    """Exactly: while nothing is delivered, the counters are those of the sum of all gradients."""
    generator, memory, nothing = np.random.default_rng(1), built(Partial, SIZE, beta=beta), np.empty(0, np.int32)
    owed = np.zeros(SIZE, np.float32)
    for _ in range(5):
        gradient = eighths(generator, SIZE)
        step(memory, gradient, nothing)
        owed += gradient
    expected = built(Partial, SIZE, beta=beta)
    step(expected, owed, nothing)
    assert np.array_equal(memory.state_dict()["counters"], expected.state_dict()["counters"])


@pytest.mark.parametrize("compressor", ["sketch", "quantize"])
def test_a_dense_step_leaves_the_part_that_stayed_behind(compressor):
    memory, nothing = built(Partial, SIZE, beta=0.25, compressor=compressor), np.empty(0, np.int32)
    step(memory, eighths(np.random.default_rng(2), SIZE), nothing)
    before = step(memory, np.zeros(SIZE, np.float32), nothing)[0]  # three quarters of the error
    accumulator = memory.open([(0, np.zeros(SIZE, np.float32))], 1.0)
    vector = accumulator.take_all()
    memory.close(accumulator, vector, vector.nothing())
    after = step(memory, np.zeros(SIZE, np.float32), nothing)[0]
    np.testing.assert_allclose(after, before / 4, atol=0.05 * np.abs(before).max())


def test_in_expectation_nothing_is_lost():
    """Over 400 seeds: e' = beta e + p - D, where e is what the first step left."""
    gradient, positions = np.random.default_rng(3).standard_normal(SIZE).astype(np.float32), np.arange(40, 80)
    samples = []
    for seed in range(400):
        memory = built(Partial, SIZE, beta=0.5, seed=seed)
        _, delivered = step(memory, gradient, positions.astype(np.int32))
        samples.append(2 * step(memory, np.zeros(SIZE, np.float32), np.empty(0, np.int32))[0])
    error = np.std(samples, 0, ddof=1).max() / np.sqrt(len(samples))
    assert np.abs(np.mean(samples, 0) - (gradient - delivered)).max() <= 5 * error


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.1])
def test_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ValueError, match=rf"beta must be in \(0, 1\], not {beta}"):
        built(Partial, SIZE, beta=beta)

"""Partial: a part of the error is fed back, the other one stays."""

from __future__ import annotations

import numpy as np
import pytest
from rules import NOWHERE, assert_unbiased, eighths, made, normal, send, written

from horovod_sparse.memories import Contractive, Partial

SIZE = 400
ZEROS = np.zeros(SIZE, np.float32)
either = pytest.mark.parametrize("compressor", ["sketch", "quantize"])


def fed_back(memory):
    return send(memory, ZEROS, NOWHERE)[0]


@either
def test_only_a_part_of_the_error_is_fed_back(compressor):
    gradient = eighths(np.random.default_rng(0), SIZE)
    memories = [made(Contractive, SIZE, compressor=compressor)]
    memories += [made(Partial, SIZE, compressor=compressor, beta=beta) for beta in (0.75, 0.875)]
    for memory in memories:
        send(memory, gradient, NOWHERE)
    whole, quarter, eighth = map(fed_back, memories)
    assert whole.any()
    assert np.array_equal(quarter, whole / 4)
    assert np.array_equal(eighth, whole / 8)


@pytest.mark.parametrize("beta", [0.125, 0.875])
def test_what_stays_behind_is_not_lost(beta):
    """Exactly: while nothing is delivered, the counters are those of the sum of all gradients."""
    generator, (memory, expected) = np.random.default_rng(1), (made(Partial, SIZE, beta=beta) for _ in range(2))
    gradients = [eighths(generator, SIZE) for _ in range(5)]
    for gradient in gradients:
        send(memory, gradient, NOWHERE)
    send(expected, np.sum(gradients, 0), NOWHERE)
    assert np.array_equal(memory.state_dict()["counters"], expected.state_dict()["counters"])


@either
def test_a_dense_step_leaves_the_part_that_stayed_behind(compressor):
    memory = made(Partial, SIZE, beta=0.25, compressor=compressor)
    send(memory, eighths(np.random.default_rng(2), SIZE), NOWHERE)
    before = fed_back(memory)  # three quarters of the error
    send(memory, ZEROS, None)
    np.testing.assert_allclose(fed_back(memory), before / 4, atol=0.05 * np.abs(before).max())


def test_in_expectation_nothing_is_lost():
    """e' = beta e + p - D, where e is what the first step left."""
    gradient, positions, samples = normal(3, SIZE), np.arange(40, 80, dtype=np.int32), []
    for seed in range(200):
        memory = made(Partial, SIZE, beta=0.5, seed=seed)
        _, delivered = send(memory, gradient, positions)
        samples.append(2 * fed_back(memory))
    assert_unbiased(samples, gradient - written(delivered))

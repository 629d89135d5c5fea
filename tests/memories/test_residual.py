"""The residual with decay, which loses a share of what waits in every step."""

from __future__ import annotations

import numpy as np
import pytest
from rules import eighths, made, send

from horovod_sparse.memories.residual import Residual
from horovod_sparse.rules import BucketContext


@pytest.mark.parametrize("undoable", [False, True])
def test_what_waits_decays_once_a_step(undoable):
    size, generator = 50, np.random.default_rng(0)
    memory = made(Residual, BucketContext(size, np.zeros(0, np.float32), undoable=undoable), decay=0.5)
    expected = np.zeros(size, np.float32)
    for _ in range(8):
        gradient = eighths(generator, size)
        accumulated, sent = send(memory, gradient, np.arange(3, dtype=np.int32), scale=2.0)
        expected = gradient + expected  # a scale of 2, and a decay of a half
        assert np.array_equal(accumulated, expected)
        assert np.array_equal(sent.values, expected[:3])
        expected[:3] = 0


@pytest.mark.parametrize("decay", [0, 1.01, -0.5, float("nan")])
def test_a_decay_outside_of_its_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay .*\(0, 1\]|decay must be"):
        Residual.Options(decay=decay)

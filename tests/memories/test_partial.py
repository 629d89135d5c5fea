"""Partial: only a part of the error is fed back."""

from __future__ import annotations

import numpy as np
import pytest
from rules import NOWHERE, eighths, made, send

from horovod_sparse.memories import Partial

SIZE = 400
ZEROS = np.zeros(SIZE, np.float32)


def fed_back(memory):
    return send(memory, ZEROS, NOWHERE)[0]


@pytest.mark.parametrize("compressor", ["sketch", "quantize"])
def test_a_dense_step_leaves_the_part_that_is_not_fed_back(compressor):
    memory = made(Partial, SIZE, beta=0.25, compressor=compressor)
    send(memory, eighths(np.random.default_rng(2), SIZE), NOWHERE)
    before = fed_back(memory)  # three quarters of the error
    send(memory, ZEROS, None)
    np.testing.assert_allclose(fed_back(memory), before / 4, atol=0.05 * np.abs(before).max())

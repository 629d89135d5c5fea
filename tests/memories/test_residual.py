"""Residual: what is not sent is kept, what comes back is added."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import eighths, made, send, written

from horovod_sparse.memories import Residual


def residual_of(memory):
    return memory.state_dict()["residual"].copy()


@settings(max_examples=60)
@given(
    size=st.integers(1, 400),
    k=st.integers(0, 400),
    seed=st.integers(0, 2**31),
    returns=st.integers(0, 9),
    scale=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_acc_is_what_was_delivered_plus_what_is_kept(size, k, seed, returns, scale):
    generator, memory = np.random.default_rng(seed), made(Residual, size)
    for _ in range(3):
        before, gradient = residual_of(memory), eighths(generator, size)
        _, delivered = send(memory, gradient, k, returns=min(returns, k, size), scale=scale)
        assert np.array_equal(scale * before + gradient, written(delivered) + residual_of(memory))

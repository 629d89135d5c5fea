"""Quantization: rounded at random, independently wherever it happens."""

from __future__ import annotations

import numpy as np
from memories.test_compressed import filled
from rules import made

from horovod_sparse.memories import Contractive


def test_ranks_buckets_and_steps_round_independently():
    codes = [
        filled("quantize", **where).state_dict()["codes"].tobytes()
        for where in ({}, {"rank": 1}, {"bucket": 1}, {"step": 1})
    ]
    assert len(set(codes)) == 4


def test_four_bits_take_an_eighth_of_a_residual():
    state = made(Contractive, 200_000, compressor="quantize", bits=4).state_dict()
    assert state["codes"].nbytes + state["scales"].nbytes <= 0.15 * 200_000 * np.dtype(np.float32).itemsize

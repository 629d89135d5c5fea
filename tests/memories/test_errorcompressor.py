"""Both error compressors: what they have in common, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
from memories.errors import LIKE, eighths

from horovod_sparse.memories.errorcompressor import make
from horovod_sparse.place import Place

SIZE = 500
NOTHING = np.empty(0, np.int32)
NAMES = ["sketch", "quantize"]


def built(name, **place):
    return make(Place(SIZE, LIKE, **place), name, saving=0.5, rows=1, bits=8, seed=3)


def decoded(compressor, factor=1.0):
    buffer = np.full(SIZE, np.nan, np.float32)
    compressor.decode(buffer, factor)
    return buffer


def filled(name, **place):
    compressor = built(name, **place)
    compressor.update(eighths(np.random.default_rng(0), SIZE), NOTHING, 0.0)
    return compressor


@pytest.mark.parametrize("name", NAMES)
def test_a_new_one_holds_nothing(name):
    assert not decoded(built(name)).any()


@pytest.mark.parametrize("name", NAMES)
def test_rescaling_multiplies_and_zero_forgets(name):
    compressor = filled(name)
    before = decoded(compressor)
    compressor.rescale(0.5)
    assert np.allclose(decoded(compressor), before / 2)
    assert np.array_equal(decoded(compressor, 0.25), 0.25 * decoded(compressor))
    compressor.rescale(0.0)
    assert not decoded(compressor).any()


@pytest.mark.parametrize("name", NAMES)
def test_adding_to_a_buffer_is_adding_what_is_decoded(name):
    compressor, buffer = filled(name), np.ones(SIZE, np.float32)
    compressor.add_to(buffer, -2.0)
    assert np.array_equal(buffer, 1 - 2 * decoded(compressor))


def test_ranks_share_the_hash_of_a_sketch_and_buckets_do_not():
    counters = [filled("sketch", **place).state_dict()["counters"] for place in ({}, {"rank": 1}, {"bucket": 1})]
    assert np.array_equal(counters[0], counters[1])
    assert not np.array_equal(counters[0], counters[2])


def test_ranks_buckets_and_steps_round_independently():
    codes = [filled("quantize", **place).state_dict()["codes"] for place in ({}, {"rank": 1}, {"bucket": 1})]
    again = built("quantize")
    for _ in range(2):
        again.update(eighths(np.random.default_rng(0), SIZE), NOTHING, 1.0)
    codes.append(again.state_dict()["codes"])
    assert len({one.tobytes() for one in codes}) == 4

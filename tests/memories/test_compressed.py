"""The laws of both error compressors, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, NOWHERE, eighths

from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.rules import BucketContext

SIZE = 500
either = pytest.mark.parametrize("name", ["sketch", "quantize"])


def built(name, **context):
    return compressor_for(BucketContext(SIZE, LIKE, **context), CompressedOptions(compressor=name, saving=0.5, seed=3))


def decoded(compressor, factor=1.0):
    buffer = np.full(SIZE, np.nan, np.float32)
    compressor.decode(buffer, factor)
    return buffer


def filled(name, step=0, **context):
    compressor = built(name, **context)
    compressor.update(eighths(np.random.default_rng(0), SIZE), NOWHERE, 0.0, step)
    return compressor


@either
def test_a_new_one_holds_nothing(name):
    assert not decoded(built(name)).any()


@either
def test_rescaling_multiplies_and_zero_forgets(name):
    compressor = filled(name)
    before = decoded(compressor)
    compressor.rescale(0.5)
    assert np.allclose(decoded(compressor), before / 2)
    assert np.array_equal(decoded(compressor, 0.25), 0.25 * decoded(compressor))
    compressor.rescale(0.0)
    assert not decoded(compressor).any()


@either
def test_adding_to_a_buffer_is_adding_what_is_decoded(name):
    compressor, buffer = filled(name), np.ones(SIZE, np.float32)
    compressor.add_to(buffer, -2.0)
    assert np.array_equal(buffer, 1 - 2 * decoded(compressor))

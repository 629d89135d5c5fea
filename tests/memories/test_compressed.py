"""The laws of both error compressors."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, NOWHERE, eighths, made

from horovod_sparse.memories import Contractive
from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.rules import BucketContext

SIZE = 400
CODES = {"compressor": "quantize", "bits": 4}
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
def test_an_error_is_empty_at_first_and_can_be_rescaled_added_and_cleared(name):
    assert not decoded(built(name)).any()
    compressor = filled(name)
    before = decoded(compressor)
    compressor.rescale(0.5)
    after, buffer = decoded(compressor), np.ones(SIZE, np.float32)
    assert np.allclose(after, before / 2)
    assert np.array_equal(decoded(compressor, 0.25), 0.25 * after)
    compressor.decode(buffer, -2.0, add=True)
    assert np.array_equal(buffer, 1 - 2 * after)
    compressor.rescale(0.0)
    assert not decoded(compressor).any()


@pytest.mark.parametrize(
    ("name", "where", "different"),
    [
        ("sketch", [{}, {"rank": 1}, {"step": 1}], 1),
        ("sketch", [{}, {"bucket": 1}], 2),
        ("quantize", [{}, {"rank": 1}, {"bucket": 1}, {"step": 1}], 4),
    ],
)
def test_ranks_share_a_sketchs_hash_and_round_codes_independently(name, where, different):
    arrays = [next(iter(filled(name, **one).state_dict().values())).tobytes() for one in where]
    assert len(set(arrays)) == different


@pytest.mark.parametrize(("options", "most"), [({"saving": 0.6}, 0.41), ({"saving": 0.9}, 0.11), (CODES, 0.15)])
def test_memory_use_is_as_reported(options, most):
    arrays = [array for array in made(Contractive, 200_000, **options).state_dict().values() if np.ndim(array)]
    assert sum(array.nbytes for array in arrays) <= most * 200_000 * LIKE.itemsize


def test_a_sketch_larger_than_the_residual_is_refused():
    with pytest.raises(
        ValueError, match="rank 2: a sketch of 16 counters is larger than the residual of bucket 5 with"
    ):
        made(Contractive, BucketContext(10, LIKE, bucket=5, rank=2, ranks=4))

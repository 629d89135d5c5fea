"""CountSketch: error bound, removal of delivered entries, and size."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, NOWHERE, made, normal, send

from horovod_sparse.kernels import cpu
from horovod_sparse.memories import Contractive
from horovod_sparse.memories.sketch import CountSketch
from horovod_sparse.rules import BucketContext

SIZE = 400


def test_the_error_of_one_row_is_within_its_bound():
    """E ||C(x) - x||^2 <= n/w ||x||^2, and not far below, so that the test is sensitive."""
    x, squares = normal(0, SIZE), []
    for seed in range(400):
        sketch = CountSketch(BucketContext(SIZE, LIKE), 0.6, 1, seed, 0)
        sketch.update(x.copy(), NOWHERE, 0.0, 0)
        decoded = np.empty(SIZE, np.float32)
        sketch.decode(decoded, 1.0)
        squares.append(np.square(decoded - x).sum() / np.square(x).sum())
    width = cpu.sketch_length(SIZE, 0.4, 1)
    assert 0.5 * SIZE / width < np.mean(squares) <= SIZE / width


def test_sending_a_block_clears_its_error():
    """Each section of the sketch covers a range of the bucket: sending a block of that size leaves no noise."""
    size = 4 * 16_384
    memory = made(Contractive, size, saving=0.9)
    for section in range(4):
        positions = np.arange(section * 16_384, (section + 1) * 16_384, dtype=np.int32)
        send(memory, normal(section, size), positions)
        after, _ = send(memory, np.zeros(size, np.float32), NOWHERE)
        assert np.abs(after[positions]).max() < 1e-4


def test_a_sketch_larger_than_the_residual_is_refused():
    with pytest.raises(
        ValueError, match="rank 2: a sketch of 16 counters is larger than the residual of bucket 5 with"
    ):
        made(Contractive, BucketContext(10, LIKE, bucket=5, rank=2, ranks=4))

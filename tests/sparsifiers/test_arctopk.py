"""ARCTopK: the best blocks of the sum over the ranks, estimated by a sketch."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, same_bits, sum_bytes, summed
from pipelines import check_steps, own, run
from rules import LIKE, made, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import ARCTopK, StableTopK


def padded(array, block):
    """Rows of blocks, the last one padded with zeros."""
    return np.pad(array, (0, -array.size % block)).reshape(-1, block)


def published(total, count, block, columns, seed, number):
    """The blocks with the largest norm of S = G V / sqrt(r), of the sum of all ranks' accumulated gradients."""
    generator = BucketContext(total.size, LIKE).generator(seed, number, shared=True)
    matrix = generator.standard_normal((block, columns)).astype(np.float32).astype(np.float64)
    norms = np.linalg.norm(padded(total.astype(np.float64), block) @ matrix / np.sqrt(columns), axis=1)
    return np.sort(np.argsort(-norms, kind="stable")[:count])


@pytest.mark.law
@pytest.mark.parametrize(("size", "block", "columns", "refresh"), [(1000, 8, 4, 1), (1003, 10, 1, 3), (64, 1, 2, 1)])
def test_every_step_equals_the_reference(transport, size, block, columns, refresh):
    spec = Sparse.of(0.1, "arctopk", collective="shared", block=block, columns=columns, refresh=refresh, seed=3)
    pipeline, blocks = pipeline_for(spec, size, LIKE, transport), []
    count = max(1, round(0.1 * size) // block)

    def select(accumulators, number):
        if number % refresh == 0:
            blocks[:] = published(accumulators.sum(0, np.float64), count, block, columns, 3, number)
        return np.isin(np.arange(size) // block, blocks)

    check_steps(transport, pipeline, select, 6)


@pytest.mark.law
def test_noise_that_cancels_between_ranks_is_not_chosen(transport):
    """Stable Top-K, which adds up the ranks' squared norms, would choose it."""
    signal, noise = np.zeros(640, np.float32), np.zeros(640, np.float32)
    signal[:64], noise[64:128] = 1, 50
    sign = 0 if transport.size % 2 and transport.rank == transport.size - 1 else (-1) ** transport.rank
    gradient, found = signal + sign * noise, {}
    for rule in (ARCTopK, StableTopK):
        context = BucketContext(640, LIKE, 0, transport.rank, transport.size, transport.allreduce)
        found[rule] = take(made(rule, context, block=64), gradient.copy(), 64)[0].indices
        assert same_bits(transport, found[rule])
    assert found[ARCTopK][0] == 0
    assert found[StableTopK][0] == (64 if transport.size > 1 else 0)


def test_held_positions_do_not_count():
    gradient, buffer = np.ones(40, np.float32), np.zeros(40, np.float32)
    buffer[10:20] = 100
    accumulator = Accumulator(buffer, [(0, gradient[:10]), (20, 2 * gradient[20:])])
    vector = made(ARCTopK, 40, block=10, columns=8).take(accumulator, 20, Step())
    assert vector.indices.tolist() == list(range(20, 40))
    assert buffer[10:20].tolist() == [100.0] * 10


@pytest.mark.law
def test_sketches_are_sent_only_in_choosing_steps(transport):
    size, block, columns = 64_000 * transport.size, 64, 4
    spec = Sparse.of(0.1, "arctopk", collective="shared", block=block, columns=columns, refresh=2)
    pipeline, sent = pipeline_for(spec, size, LIKE, transport), []
    for number in range(4):
        gradient = own(transport, number).standard_normal(size).astype(np.float32)
        run(pipeline, gradient)
        sent.append(pipeline.statistics(norms=False).bytes_sent)
    values, sketch = sum_bytes(transport, 4 * size // 10), sum_bytes(transport, 4 * columns * size // block)
    assert everywhere(transport, abs(sent[2] - values - sketch) <= 100 and abs(sent[3] - values) <= 100), sent
    assert transport.size == 1 or summed(transport, sent[0]) > 0

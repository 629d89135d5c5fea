"""ARTopK: one rank selects for all."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere
from rules import LIKE, eighths, made, take

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import BucketContext, Conditions
from horovod_sparse.sparsifiers import ARTopK, TopK


@pytest.mark.law
@pytest.mark.parametrize("leader", ["turn", "norm"])
def test_every_step_equals_the_reference(transport, leader):
    rank, ranks, size, k = transport.rank, transport.size, 300, 15
    pipeline = pipeline_for(Sparse.of(0.05, "artopk", collective="union", leader=leader), size, LIKE, transport)
    residual, generator, leaders = np.zeros((ranks, size), np.float32), np.random.default_rng(5), set()
    for number in range(12):
        gradients = eighths(generator, (ranks, size), 1000)
        output = np.full(size, np.nan, np.float32)
        pipeline.run([(0, gradients[rank].copy())], [(0, output)], Conditions())
        residual += gradients
        largest = np.argsort(-np.abs(residual), axis=1, kind="stable")[:, :k]
        squares = np.take_along_axis(residual.astype(np.float64), largest, 1) ** 2
        lead = number % ranks if leader == "turn" else int(squares.sum(1).argmax())
        leaders.add(lead)
        expected = np.zeros(size, np.float32)
        expected[largest[lead]] = residual[:, largest[lead]].sum(0)
        assert everywhere(transport, np.array_equal(output, expected)), number
        residual[:, largest[lead]] = 0
        assert everywhere(transport, np.array_equal(pipeline.state_dict()["memory"]["residual"], residual[rank]))
    assert len(leaders) > 1 or ranks == 1


def test_a_rank_selects_like_topk_in_its_turn_and_nothing_otherwise():
    gradient = np.arange(1, 51, dtype=np.float32)
    for number in range(6):
        for rank in range(3):
            vector, rest = take(made(ARTopK, BucketContext(50, LIKE, rank=rank, ranks=3)), gradient, 5, number)
            expected = take(made(TopK, 50), gradient, 5 if number % 3 == rank else 0)[0]
            assert np.array_equal(vector.indices, expected.indices)
            assert rest.sum() == gradient.sum() - vector.values.sum()


@pytest.mark.law
def test_the_volume_does_not_grow_with_the_world_size(transport):
    size, k, ranks = 100_000, 10_000, transport.size
    pipeline = pipeline_for(Sparse.of(0.1, "artopk", collective="union", indices="plain"), size, LIKE, transport)
    sent = []
    for number in range(2 * ranks):
        gradient = np.random.default_rng([transport.rank, number]).standard_normal(size).astype(np.float32)
        pipeline.run([(0, gradient)], [(0, gradient)], Conditions())
        sent.append(pipeline.statistics(norms=False).bytes_sent)
    # Each rank passes the positions on, and sends two shares of the values.
    expected = (ranks - 1) / ranks * (4 * k + 2 * 4 * k)
    assert everywhere(transport, abs(np.mean(sent) - expected) <= 0.05 * expected)

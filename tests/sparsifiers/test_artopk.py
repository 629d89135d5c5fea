"""ARTopK: one rank selects for all."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere
from pipelines import check_steps, own, run
from rules import LIKE

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for


@pytest.mark.law
@pytest.mark.parametrize("leader", ["turn", "norm"])
def test_every_step_equals_the_reference(transport, leader):
    ranks, size, k, leaders = transport.size, 300, 15, set()
    pipeline = pipeline_for(Sparse.of(0.05, "artopk", collective="union", leader=leader), size, LIKE, transport)

    def select(accumulators, number):
        largest = np.argsort(-np.abs(accumulators), axis=1, kind="stable")[:, :k]
        squares = np.take_along_axis(accumulators.astype(np.float64), largest, 1) ** 2
        lead = number % ranks if leader == "turn" else int(squares.sum(1).argmax())
        leaders.add(lead)
        return np.isin(np.arange(size), largest[lead])

    check_steps(transport, pipeline, select, 12)
    assert len(leaders) > 1 or ranks == 1


@pytest.mark.law
def test_the_volume_does_not_grow_with_the_world_size(transport):
    size, k, ranks = 100_000, 10_000, transport.size
    pipeline = pipeline_for(Sparse.of(0.1, "artopk", collective="union", indices="plain"), size, LIKE, transport)
    sent = []
    for number in range(2 * ranks):
        gradient = own(transport, number).standard_normal(size).astype(np.float32)
        run(pipeline, gradient)
        sent.append(pipeline.statistics(norms=False).bytes_sent)
    # Each rank passes the positions on, and sends two shares of the values.
    expected = (ranks - 1) / ranks * (4 * k + 2 * 4 * k)
    assert everywhere(transport, abs(np.mean(sent) - expected) <= 0.05 * expected)

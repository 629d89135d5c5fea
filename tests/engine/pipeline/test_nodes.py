"""States of ranks that are on other nodes than when they were saved."""

from __future__ import annotations

import numpy as np
import pytest
from laws import content, everywhere, same_bits, summed
from pipelines import own, residual, run
from rules import LIKE, eighths

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for

pytestmark = pytest.mark.law

SIZE = 1200


def build(transport, collective, node_ranks):
    return pipeline_for(parse(f"{collective}:density=0.05,node_ranks={node_ranks}"), SIZE, LIKE, transport)


@pytest.mark.parametrize("collective", ["auto", "hierarchical"])
@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1)])
def test_on_other_nodes_the_collective_starts_again_and_nothing_is_lost(transport, caplog, collective, saved, now):
    """With Hierarchical, a rank that was the first of its node no longer is, or the other way round."""
    draw, given, delivered = own(transport), np.zeros(SIZE), np.zeros(SIZE)
    first, second = (build(transport, collective, node_ranks) for node_ranks in (saved, now))
    fresh = content(second.state_dict()["collective"])
    for number in range(20):
        if number == 10:
            state = first.state_dict()
            second.load_state_dict(state)
            again = content(second.state_dict()["collective"])
            assert everywhere(transport, again == fresh or transport.size == 1)
            assert everywhere(transport, np.array_equal(residual(first), residual(second)))
        gradient = eighths(draw, SIZE, 64)
        given += gradient
        total = run(first if number < 10 else second, gradient.copy())
        assert same_bits(transport, total)
        delivered += total
    transport.barrier()
    said = f"bucket 0: the ranks are on other nodes: {'Auto' if collective == 'auto' else 'Hierarchical'} starts from"
    assert everywhere(transport, transport.rank > 0 or (said in caplog.text) == (transport.size > 1))
    assert everywhere(transport, np.allclose(delivered + summed(transport, residual(second)), summed(transport, given)))


def test_a_state_of_other_world_sizes_is_refused(transport):
    pipeline = build(transport, "hierarchical", 2)
    state = pipeline.state_dict()
    state["collective"] = {**state["collective"], "nodes": [0] * (transport.size + 1)}
    del state["collective"]["inner"]
    with pytest.raises(ValueError, match="cannot load this state"):
        pipeline.load_state_dict(state)

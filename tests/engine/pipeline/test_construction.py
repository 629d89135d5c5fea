"""A pipeline is constructed on all ranks or on none."""

from __future__ import annotations

import pytest
from laws import everywhere
from rules import LIKE

from horovod_sparse.collectives import hierarchical
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.memories import Residual

SPARSE = Sparse.of(0.1, collective="hierarchical", node_ranks=2, outer="gtopk")


def refusal(transport):
    """Return the error that the construction of a pipeline raises."""
    try:
        pipeline_for(SPARSE, 100, LIKE, transport)
    except Exception as error:
        return error
    return None


@pytest.mark.law
def test_a_construction_that_fails_on_the_first_ranks_of_nodes_fails_on_all_ranks(transport, monkeypatch):
    rules = hierarchical._RULES

    def refuse(*_):
        raise ValueError("an option that does not go with two nodes")

    monkeypatch.setitem(rules, SPARSE.collective.outer.__class__, refuse)
    error = refusal(transport)
    first = transport.rank % 2 == 0
    assert everywhere(transport, isinstance(error, ValueError) and "does not go with two nodes" in str(error))
    assert everywhere(transport, first or "could not begin" in str(error))
    transport.barrier()  # nobody waits in another call


@pytest.mark.mpi
@pytest.mark.law
def test_an_allocation_that_fails_on_one_rank_fails_on_all_ranks(transport, monkeypatch):
    last = transport.rank == transport.size - 1
    if last:
        monkeypatch.setattr(Residual, "__init__", lambda *_: (_ for _ in ()).throw(MemoryError("400 GB")))
    error = refusal(transport.duplicate())  # whose ranks have not been divided into nodes yet
    assert everywhere(transport, isinstance(error, MemoryError if last else ValueError) and "400 GB" in str(error))
    transport.barrier()
    monkeypatch.undo()
    assert everywhere(transport, refusal(transport) is None)

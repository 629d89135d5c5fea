"""Ranks whose facts differ, or that had an error, raise on every rank."""

from __future__ import annotations

import pytest
from laws import everywhere

from horovod_sparse.transport.agreement import agree

pytestmark = pytest.mark.law

FACTS = {"version": "1", "parameters": {"a": (2, 3), "b": (4,)}}


def raised(transport, mine):
    try:
        agree(transport, mine)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_agree_exchange_only_digests(transport, monkeypatch):
    gathered = []
    monkeypatch.setattr(transport, "allgather_object", gathered.append)
    assert raised(transport, FACTS) == ""
    assert gathered == []


@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_an_error_is_raised_on_its_rank_and_named_on_the_others(transport, who):
    rank, ranks = transport.rank, transport.size
    failing = {"first": range(1), "last": range(ranks - 1, ranks), "all": range(ranks)}[who]
    text = raised(transport, ValueError(f"rank {rank}: odd") if rank in failing else FACTS)
    expected = f"rank {rank}: odd" if rank in failing else f"rank {rank}: rank {failing[0]} could not begin: odd"
    assert everywhere(transport, text == expected)
    assert everywhere(transport, raised(transport, FACTS) == "")  # no message is left over


@pytest.mark.parametrize("who", ["first", "last"])
def test_a_fact_that_differs_on_one_rank_is_named_on_all(transport, who):
    rank, ranks = transport.rank, transport.size
    odd = 0 if who == "first" else ranks - 1
    text = raised(transport, {**FACTS, "parameters": {"a": (2, 3), "b": (5,)}} if rank == odd else FACTS)
    theirs, first, other = (4, 5, 1) if odd == 0 else (5, 4, odd)  # rank 0's fact counts
    expected = (
        f"rank {rank}: parameters.b differs between ranks: rank {other} has {theirs}, rank 0 has {first}: "
        "give every rank the same"
    )
    assert everywhere(transport, text == ("" if ranks == 1 else expected))

"""The reduce-scatter of sharded models: each rank gets the sums of its region, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import dense, everywhere, examples

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.collectives import ReduceScatter
from horovod_sparse.rules import ANYWHERE
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law

WIDTH = 40


def collective(transport, **options):
    return ReduceScatter(replace(ANYWHERE, shared={}), transport.channel(), ReduceScatter.Options(**options))


def values(seed, rank, size):
    """Values that are eighths of small integers, whose sums are exact."""
    return (np.random.default_rng([seed, rank]).integers(-64, 64, size) / 8).astype(np.float32)


def selection(seed, rank, size, density, shared=False):
    chosen = np.flatnonzero(np.random.default_rng([seed, 0 if shared else rank, 1]).random(size) < density)
    return SparseVector(chosen.astype(np.int32), values(seed, rank, size)[chosen], size, shared)


def gathered(transport, one):
    return transport.allgather_object(one)


@examples(20)
@given(
    seed=st.integers(0, 999),
    density=st.sampled_from([0.0, 0.05, 0.5]),
    kind=st.sampled_from(["own", "all", "shared", "dense"]),
    wire=st.sampled_from([None, "bfloat16", "log4"]),
)
def test_each_rank_has_the_sums_of_its_region_and_nothing_is_lost(transport, seed, density, kind, wire):
    rank, size = transport.rank, WIDTH * transport.size
    rule = collective(transport, wire=wire)
    begin, end = rule.region(size)
    vector, own = selection(seed, rank, size, density, kind == "shared"), np.zeros(size, np.float32)
    if kind == "dense":
        vector = SparseVector.full(values(seed, rank, size))
    elif kind == "own":  # nothing is selected there
        outside = np.flatnonzero((vector.indices < begin) | (vector.indices >= end))
        vector = vector.part(outside.astype(np.int32))
        own[begin:end] = values(seed, rank, size)[begin:end]
    given_ = dense(vector) + own
    if kind == "own":
        held = Accumulator(own[begin:end].copy(), [(0, own[begin:end])])
        held.settled = True
        exchange = rule.allreduce_owned(vector, len(vector), held)
        given_ -= dense(exchange.returned) + own  # which are to be added to what it holds
    else:
        exchange = rule.allreduce(vector, len(vector))
        given_ -= dense(exchange.returned)
    total = dense(exchange.total)
    assert everywhere(transport, not total[:begin].any() and not total[end:].any())
    assert np.allclose(sum(gathered(transport, total)), sum(gathered(transport, given_)), atol=1e-5)


def test_only_entries_of_other_regions_are_sent(transport):
    ranks, size = transport.size, 1000 * transport.size
    rule = collective(transport, indices="plain")
    rule.allreduce(SparseVector(np.arange(0, size, 10, dtype=np.int32), np.ones(size // 10, np.float32), size), 0)
    entries = 100 * (ranks - 1)
    assert everywhere(transport, 8 * entries <= rule.traffic.bytes_sent <= 8 * entries + 64 * (ranks - 1))

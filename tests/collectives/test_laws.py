"""Laws of every collective, at every world size. Files named after collectives test what is specific to one."""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace

import numpy as np
import pytest
from exchanges import DEVICE, HOST, every_device, every_way, through
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    LOGARITHMIC,
    NARROWER,
    SHARED,
    Case,
    allreduce,
    cases,
    check_exchange,
    digest_of,
    everywhere,
    examples,
    make,
    placed,
    same_bits,
    summed,
)

from horovod_sparse.kernels import to_host
from horovod_sparse.rules.testing.collectives import check_restored
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law

EXACT = [(None, "float32"), (None, "float64")]


@pytest.fixture(autouse=True)
def slow_network(network):
    """Network on which Auto's choice varies."""
    network("slow")


# What a collective's values travel as, and what they are.
FORMATS = [*EXACT, *NARROWER, *LOGARITHMIC]


def with_wire(settings, wire, indices=None):
    chosen = {"wire": wire, "indices": indices}
    return {**settings, **{key: one for key, one in chosen.items() if one is not None}}


def fits(name, case):
    return name != "shared" or case.pattern in SHARED


def results(transport, name, settings, steps, way):
    """Run a few steps of a collective, check its laws, and return a digest of all results."""
    with through(way, transport.rank) as put:
        collective = make(transport, name, steps[0].dtype, put, **settings)
        exchanges = [check_exchange(transport, collective, case, put) for case in steps if fits(name, case)]
    return [digest_of(reduced.total, reduced.returned) for reduced in exchanges]


# The emulated device is slow: one example in four, on one of its ways.
SOME = st.sampled_from([[HOST]] * 9 + [[HOST, way] for way in DEVICE])


@examples(18)
@given(
    steps=st.lists(cases("float32"), min_size=1, max_size=2),
    chosen=st.integers(0, 99),
    indices=st.sampled_from([None, "plain", "coded", "coded"]),
    ways=SOME,
)
def test_nothing_is_lost_and_all_ranks_and_devices_have_the_same_bits(
    transport, name, settings, steps, chosen, indices, ways
):
    wire, dtype = FORMATS[chosen % len(FORMATS)]
    most = 50_000 if ways == [HOST] else 400
    steps = [replace(case, dtype=dtype, size=min(case.size, most)) for case in steps]
    indices = None if name == "dense" else indices
    found = [results(transport, name, with_wire(settings, wire, indices), steps, way) for way in ways]
    assert everywhere(transport, all(one == found[0] for one in found))


@pytest.mark.parametrize("k", ["1", "n"])
def test_fewer_elements_than_ranks_and_empty_or_full_selections(transport, name, settings, k):
    for wire, dtype in [EXACT[0], *NARROWER[1:], *LOGARITHMIC]:
        indices = "coded" if wire in ("float32", "log8") and name != "dense" else None
        collective = make(transport, name, dtype, **with_wire(settings, wire, indices))
        for size, pattern in itertools.product((1, 2, 3, 5), ("everything", "all empty", "disjoint")):
            case = Case(size, pattern, dtype=dtype, share=1 if k == "n" else 1e-9)
            if fits(name, case):
                check_exchange(transport, collective, case)


@pytest.mark.parametrize("size", [1000, 1001, 64])
@pytest.mark.parametrize("rule", ["dense", "topka", "topkdsa"])
def test_collectives_without_a_limit_return_nothing(transport, rule, size):
    for pattern in ("everything", "disjoint", "random", "some empty"):
        reduced = check_exchange(transport, make(transport, rule), Case(size, pattern, seed=3, share=1e-9))
        assert len(reduced.returned) == 0
        assert reduced.total.indices is None or rule != "dense"


@pytest.mark.nightly
@pytest.mark.parametrize("pattern", ["one region", "disjoint"])
def test_a_million_elements(transport, name, settings, pattern):
    case = Case(1_000_000, pattern, seed=5, share=0.01)
    if fits(name, case):
        check_exchange(transport, make(transport, name, **settings), case)


@pytest.mark.parametrize("wire", [None, "bfloat16", "log8"])
def test_the_order_of_summation_does_not_depend_on_arrival(transport, name, settings, wire):
    """Random floats, whose sums depend on the order, give the same bits on every rank and in every run."""
    shared = name == "shared"
    for seed in range(3):
        indices = np.sort(np.random.default_rng([seed, 0 if shared else transport.rank]).permutation(999)[:333])
        values = np.random.default_rng([seed, transport.rank, 1]).standard_normal(333).astype(np.float32)
        vector = SparseVector(indices.astype(np.int32), values, 999, shared=shared)
        totals = [allreduce(make(transport, name, **with_wire(settings, wire)), vector, 100).total for _ in range(3)]
        assert everywhere(transport, len({digest_of(total) for total in totals}) == 1)
        assert same_bits(transport, totals[0].indices, totals[0].values)


@every_way
def test_vectors_without_indices_are_summed_dense(transport, put, name, settings):
    values = np.random.default_rng(transport.rank).integers(-99, 99, 2500).astype(np.float32) / 8
    vector = SparseVector.full(put(values))
    reduced = make(transport, name, put=put, **settings).allreduce(vector, 10)
    assert reduced.total.indices is None
    assert len(reduced.returned) == 0
    assert type(reduced.total.values) is type(vector.values)
    assert everywhere(transport, np.array_equal(to_host(reduced.total.values), summed(transport, values)))
    assert np.array_equal(to_host(vector.values), values)


@every_device
def test_infinities_and_nan_are_exchanged(transport, put, name, settings):
    values = np.random.default_rng(transport.rank).standard_normal(200).astype(np.float32) * np.float32(1e30)
    values[::7], values[3], values[8] = 0, np.inf, -np.nan
    if transport.rank:
        values[[3, 8]] = 1
    vector = SparseVector(np.arange(0, 400, 2, dtype=np.int32), values, 400, shared=True)
    with np.errstate(invalid="ignore"):
        host = make(transport, name, **settings).allreduce(vector, 50)
        here = make(transport, name, put=put, **settings).allreduce(placed(vector, put), 50)
    assert everywhere(transport, digest_of(here.total, here.returned) == digest_of(host.total, host.returned))
    assert same_bits(transport, here.total.indices, here.total.values)


# The others may write the vector out, or do not move indices.
@pytest.mark.parametrize("rule", ["topka", "topkdsa", "gtopk", "oktopk", "spardl", "hierarchical"])
def test_indices_above_2_to_the_24_and_boundary_sums_above_2_to_the_32_stay_exact(transport, rule):
    size = 2**31 - 1
    indices = np.array([2**24 + 1 + transport.rank, size - 1 - transport.rank], np.int32)
    ranks = range(transport.size)
    # SparDL has P blocks of at most k/P entries; all ranks' first indices are in one block.
    k = 2 * len(ranks) ** 2
    total = make(transport, rule).allreduce(SparseVector(indices, np.ones(2, np.float32), size), k).total
    expected = [*(2**24 + 1 + rank for rank in ranks), *(size - 1 - rank for rank in reversed(ranks))]
    assert everywhere(transport, total.indices.tolist() == expected)


def test_bytes_sent_equal_bytes_received(transport, name, settings):
    """The long messages of the second case take the ring."""
    traffics = []
    for case in (Case(5000, "everything"), Case(50_000, "everything", dtype="float64")):
        collective = make(transport, name, case.dtype, **settings)
        check_exchange(transport, collective, case)
        traffics.append(collective.traffic)
    for traffic in traffics:
        sent, received = summed(transport, traffic.bytes_sent), summed(transport, traffic.bytes_received)
        assert abs(sent - received) <= 2 * transport.size  # shares of a library's collective are rounded
        assert transport.size == 1 or min(astuple(traffic)) > 0


def test_a_restored_collective_continues_bitwise_identically(transport, name, settings):
    check_restored(transport, lambda: make(transport, name, **settings))


def test_a_subset_of_the_ranks_can_exchange(transport, name, settings):
    half = -(-transport.size // 2)
    own = transport.by_node(half).own
    check_exchange(own, make(own, name, **settings), Case(500, "same indices", seed=transport.rank // half))


def test_collectives_on_one_communicator_do_not_interfere(transport):
    pair = [make(transport, rule) for rule in ("topka", "oktopk", "gtopk")]
    for size in (1000, 10, 20_000):  # another size on the same collective is no trap
        for collective in pair:
            check_exchange(transport, collective, Case(size, "random", seed=3))

"""Predictions: what they need, the break-even point, and published measurements."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.costs.accuracy import KEEP
from horovod_sparse.costs.model import ALGORITHMS, CANDIDATES, Compute, break_even_bandwidth, predict, table
from horovod_sparse.costs.network import Link, Node

N, K = 25_000_000, 250_000
CORE = Compute(select=0.3e-9, accumulate=0.25e-9, reduce=0.25e-9, merge=4e-9, cut=20e-9)
ETHERNET = Link(alpha=25e-6, beta=8 / 1e9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("node", [None, Node(4, Link(1e-6, 1e-9))])
def test_one_rank_has_nothing_to_exchange(algorithm, node):
    cost = predict(algorithm, N, K, 1, ETHERNET, CORE, node=node)
    assert (cost.bandwidth, cost.latency, cost.merging, cost.nbytes) == (0, 0, 0, 0)
    kept, selected = N * CORE.accumulate, N * CORE.select + K * CORE.cut
    dense = {"horovod": 0, "dense": kept, "rounded": 5 * kept, "shared": kept}
    assert cost.total == dense.get(algorithm, selected)
    assert cost.rounds == 0


def test_a_table_is_sorted_and_complete():
    costs = table(N, K, 8, ETHERNET, CORE)
    assert {cost.algorithm for cost in costs} == {"dense", *CANDIDATES}
    assert [cost.total for cost in costs] == sorted(cost.total for cost in costs)
    assert costs[0].algorithm == "oktopk"


def test_four_ranks_gather_all_and_many_keep_sums():
    assert table(1_120_000, 11_200, 4, Link(5e-6, 8e-8), CORE)[0].algorithm == "topka"
    assert table(N, K, 64, ETHERNET, CORE)[0].algorithm == "oktopk"


def test_ok_topk_is_a_candidate_with_the_sums_that_make_it_as_accurate():
    [oktopk] = [cost for cost in table(N, K, 64, ETHERNET, CORE) if cost.algorithm == "oktopk"]
    assert oktopk == predict("oktopk", N, K, 64, ETHERNET, CORE, keep=KEEP)
    assert oktopk.nbytes > 1.5 * predict("oktopk", N, K, 64, ETHERNET, CORE).nbytes  # as published


@settings(max_examples=50)
@given(
    size=st.integers(1, 10**9),
    density=st.floats(1e-6, 1),
    ranks=st.integers(1, 4096),
    alpha=st.floats(0, 1e-3),
    beta=st.floats(1e-12, 1e-6),
    per_node=st.integers(1, 16),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_no_part_of_a_cost_is_negative_or_unbounded(size, density, ranks, alpha, beta, per_node, algorithm):
    k = max(1, round(density * size))
    cost = predict(algorithm, size, k, ranks, Link(alpha, beta), CORE, node=Node(per_node, Link(alpha / 2, beta / 10)))
    assert all(0 <= part < math.inf for part in asdict(cost).values() if not isinstance(part, str))


@settings(max_examples=50)
@given(
    size=st.integers(10**6, 10**9),  # a short allgather takes fewer messages than dense, however many bytes it sends
    density=st.floats(1e-4, 1),
    ranks=st.integers(17, 4096),
    alpha=st.floats(0, 1e-3),
    select=st.floats(0, 1e-8),
    per_node=st.integers(1, 16),
)
def test_sparse_wins_below_the_break_even_bandwidth_and_dense_above(size, density, ranks, alpha, select, per_node):
    k = max(1, round(density * size))
    compute = Compute(select, select, select / 10, 4e-9, 20e-9)
    node = Node(per_node, Link(alpha / 3, 1e-11))
    even = break_even_bandwidth(size, k, ranks, Link(alpha, 1.0), compute, node=node)

    def gain(bandwidth):
        link, algorithms = Link(alpha, 1 / bandwidth), ("horovod", *CANDIDATES)
        costs = table(size, k, ranks, link, compute, node=node, algorithms=algorithms)
        seconds = {cost.algorithm: cost.total for cost in costs}
        return seconds.pop("horovod") - min(seconds.values())

    if math.isfinite(even) and even > 1e-3:
        assert gain(even * 0.99) > 0 > gain(even * 1.01)
    elif even == math.inf:
        assert all(gain(bandwidth) > 0 for bandwidth in (1e3, 1e9, 1e12))
    elif even == 0:
        assert gain(1e-3) <= 0  # no link is slow enough


def test_a_density_of_one_never_pays():
    assert break_even_bandwidth(N, N, 2, ETHERNET, CORE) == 0
    assert table(N, N, 2, ETHERNET, CORE)[0].algorithm == "dense"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ringtopk", N, K, 8), "unknown algorithm 'ringtopk'; known are: horovod, dense, rounded, topka"),
        (("topka", N, 0, 8), "k = 0"),
        (("topka", 10, 11, 8), "k = 11 and size = 10"),
        (("topka", N, K, 0), "at least 1, not 0"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(*arguments, ETHERNET, CORE)


def test_values_of_4_bits_win_on_faster_links_too():
    selecting = Compute(CORE.select, CORE.accumulate, 0, merge=0)
    plain, short = (break_even_bandwidth(N, K, 8, ETHERNET, selecting, wire=wire) for wire in (None, 0.5))
    assert 0 < plain < short


def test_a_node_of_several_ranks_sends_as_many_bytes_of_a_dense_sum_as_horovods():
    node = Node(8, Link(1e-6, 1e-11))
    dense, horovod = (predict(name, N, N, 64, ETHERNET, CORE, node=node) for name in ("dense", "horovod"))
    assert dense.nbytes == pytest.approx(horovod.nbytes, rel=0.15)  # 2 n (N-1)/N for N nodes, not 2 n (P-1)/P
    odd = predict("dense", N, N, 63, ETHERNET, CORE, node=node)  # nodes differ: every rank sends to every other
    assert odd.nbytes > 2 * dense.nbytes


def test_a_dense_ring_on_ethernet_takes_as_long_as_measured():
    """25M elements on 8 nodes with 1 Gbit/s, of which TCP leaves 95.6 %: 1594 ms by Open MPI's ring."""
    cost = predict("horovod", N, K, 8, Link(25e-6, 8 / 0.956e9), CORE)
    assert cost.total == pytest.approx(1.594, rel=0.1)


def test_dense_beats_a_selection_that_sorts_where_links_are_fast():
    """Yoon and Oh: VGG-16 for CIFAR-10, 8 A100 with NVLink: 17387 samples/s dense, 3724 with sort-based top-k.

    What the selection costs is taken from their other machine: on 8 V100 an iteration of 8 * 128 samples takes 81 ms
    dense (12652 samples/s) and 274 ms with top-k (3743 samples/s).
    """
    size, density, samples = 14_700_000, 0.001, 8 * 128
    sorting = (samples / 3743 - samples / 12652) / size
    a100 = 1.555e12  # bytes/s of its memory
    compute = Compute(select=sorting, accumulate=12 / a100, reduce=12 / a100, merge=24 / a100, cut=24 / a100)
    nvlink = Link(alpha=5e-6, beta=1 / 300e9)
    costs = {cost.algorithm: cost.total for cost in table(size, round(density * size), 8, nvlink, compute)}
    assert costs["dense"] == min(costs.values())
    iteration = samples / 17387 - costs["dense"]  # all else, as measured with dense
    assert samples / (iteration + costs["topka"]) == pytest.approx(3724, rel=0.15)

"""Bytes, messages and work of each algorithm: Table 1 of Li and Hoefler (PPoPP 2022), and more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from horovod_sparse.costs.coding import coded_bytes
from horovod_sparse.costs.model import ALGORITHMS, CANDIDATES, Compute, predict
from horovod_sparse.costs.network import Link, Node

N, K = 25_000_000, 250_000
IDLE = Compute(0, 0, 0, 0, 0)  # computes in no time
CORE = Compute(select=0.3e-9, accumulate=0.25e-9, reduce=0.25e-9, merge=4e-9, cut=20e-9)
ETHERNET = Link(alpha=25e-6, beta=8 / 1e9)
LARGEST = (*CANDIDATES, "gtopk")  # what sends the largest magnitudes


def words(algorithm, ranks, k=K, size=N):
    """Words of 4 bytes that a rank sends, but for Ok-Topk's counts of entries and histograms."""
    nbytes = predict(algorithm, size, k, ranks, ETHERNET, IDLE, indices="plain").nbytes
    histograms = 4 * (1024 * (ranks - 1) if ranks <= 32 else 2048 * (ranks - 1) / ranks)
    return (nbytes - (8 * (ranks - 1) + histograms if algorithm == "oktopk" else 0)) / 4


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 256, 1024, 4096])
def test_bandwidth_is_that_of_table_1(ranks):
    others = (ranks - 1) / ranks
    assert words("dense", ranks) == words("horovod", ranks) == pytest.approx(2 * N * others)
    assert words("topka", ranks) == pytest.approx(2 * K * (ranks - 1))
    assert 4 * K * others * 0.9 <= words("topkdsa", ranks) <= (2 * K + N) * others * (1 + 1e-9)
    assert words("gtopk", ranks) == pytest.approx(4 * K * math.log2(ranks))
    assert 2 * K * others <= words("oktopk", ranks) <= 6 * K * others
    assert words("shared", ranks) == pytest.approx(2 * K * others)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "messages", "rounds"),
    [
        ("horovod", 8, 6, None),  # 2 log P
        *((name, 8, 7 + 7, 2) for name in ("dense", "rounded", "shared")),  # to the owners, ring
        ("topka", 8, 7, 1),  # ring
        ("topkdsa", 5, 4 + 4, 1 + 1),  # four exchanges at a time
        ("topkdsa", 6, 5 + 5, 2 + 1),
        ("topkdsa", 8, 7 + 7, 2 + 1),
        ("oktopk", 8, 7 + 4 * 3 + 3 + 7, 2 + 4 + 1 + 1),  # to the owners, four histograms, counts, ring
        ("oktopk", 5, 4 + 4 * 3 + 3 + 4, 1 + 4 + 1 + 1),
        ("gtopk", 8, 6, 6),
        ("gtopk", 5, 6, 6),  # a tree for 5 ranks is as deep as one for 8
    ],
)
def test_latency_counts_messages_that_follow_each_other_and_rounds_that_are_waited_for(
    algorithm, ranks, messages, rounds
):
    assert predict(algorithm, N, K, ranks, Link(1.0, 0.0), IDLE).latency == messages
    cost = predict(algorithm, N, K, ranks, Link(0, 0), Compute(0, 0, 0, 0, wait=1.0))
    if rounds is not None:
        assert cost.rounds == cost.latency == rounds
        assert cost.times(3).latency == 3 * rounds


@pytest.mark.parametrize(("density", "ranks"), [(0.01, 2), (0.01, 8), (0.3, 3), (0.001, 64), (1.0, 4)])
def test_fill_in_is_that_of_independent_selections(density, ranks):
    k = round(density * N)
    kept = 1 - math.prod(1 - density for _ in range(ranks))  # of a position, by at least one rank
    gathered = min(2 * kept, 1) * N * (ranks - 1) / ranks
    assert words("topkdsa", ranks, k) - 2 * k * (ranks - 1) / ranks == pytest.approx(gathered)


@pytest.mark.parametrize(
    ("algorithm", "k", "factor"),
    [*((name, K, 6 / 8) for name in ("topka", "gtopk", "oktopk")), ("topkdsa", N, 8 / 12), ("shared", K, 1 / 2)],
)
def test_values_of_16_bits_save_a_quarter_of_an_entry_and_half_of_what_has_no_index(algorithm, k, factor):
    full, half = (predict(algorithm, N, k, 8, ETHERNET, IDLE, wire=wire, indices="plain").nbytes for wire in (None, 2))
    assert half == pytest.approx(factor * full, rel=5e-3)


def test_an_entry_of_float64_has_twelve_bytes_and_only_rounded_dense_exchanges_know_a_format():
    single, double = (
        predict("gtopk", N, K, 8, ETHERNET, IDLE, itemsize=size, indices="plain").nbytes for size in (4, 8)
    )
    assert double == 1.5 * single
    assert predict("dense", N, K, 8, ETHERNET, IDLE, wire=2) == predict("dense", N, K, 8, ETHERNET, IDLE)
    dense = predict("dense", N, N, 8, ETHERNET, IDLE)
    for algorithm, wire in (("rounded", 2), ("rounded", 1), ("horovod", 2)):
        assert predict(algorithm, N, N, 8, ETHERNET, IDLE, wire=wire).nbytes == dense.nbytes * wire / 4


@pytest.mark.parametrize(("ranks", "passes"), [(2, 1.5), (8, 1.5), (64, 1.5)])
def test_a_dense_allreduce_rounds_values_and_sums_and_reads_both(ranks, passes):
    """Written: n values and n / P sums; read: n (P-1) / P values and n sums. A conversion is one of each."""
    converting = Compute(0, 0, 0, 0, convert=1.0)
    assert predict("rounded", N, N, ranks, ETHERNET, converting, wire=1).merging == pytest.approx(passes * N)
    assert predict("rounded", N, N, ranks, ETHERNET, converting, wire=2).merging == pytest.approx(passes * N / 3)
    assert predict("rounded", N, N, ranks, ETHERNET, converting).merging == 0  # full precision


@pytest.mark.parametrize("algorithm", LARGEST)
def test_rounding_errors_of_sparse_vectors_are_merged_with_what_returns(algorithm):
    merging = Compute(0, 0, 0, merge=1.0)
    full, short = (predict(algorithm, N, K, 8, ETHERNET, merging, wire=wire).merging for wire in (4, 0.5))
    assert short >= full + 2 * K


def test_dense_selects_nothing_and_shared_indices_are_not_searched_for():
    searching = Compute(select=1.0, accumulate=0, reduce=0, merge=0, cut=0)
    found = {name for name in ALGORITHMS if predict(name, N, K, 8, ETHERNET, searching).selection}
    assert found == {*LARGEST, "hierarchical"}


def test_selected_entries_are_ranked():
    ranking = Compute(select=0, accumulate=0, reduce=0, merge=0, cut=1.0)
    assert predict("topka", N, K, 8, ETHERNET, ranking).selection == K


@pytest.mark.parametrize("algorithm", LARGEST)
def test_received_entries_are_merged(algorithm):
    merging = Compute(0, 0, 0, merge=1.0, cut=0)
    assert predict(algorithm, N, K, 8, ETHERNET, merging).merging >= K


@pytest.mark.parametrize("algorithm", LARGEST)
def test_indices_are_coded_where_that_is_faster(algorithm):
    """Coding costs nothing, or more than the bytes that it saves."""
    for code, chosen in ((0.0, "coded"), (1e-9, "coded"), (1e-6, "plain")):
        core = replace(CORE, code=code)
        costs = {one: predict(algorithm, N, K, 8, ETHERNET, core, indices=one) for one in ("coded", "plain", None)}
        assert costs[None] == costs[chosen] == min(costs.values(), key=lambda cost: cost.total)
        assert costs["plain"].merging <= costs["coded"].merging


@pytest.mark.parametrize(("density", "bits"), [(0.001, 11.49), (0.01, 8.11), (0.1, 4.76), (0.5, 2.0), (1.0, 1.0)])
def test_a_coded_index_has_the_bits_of_the_code(density, bits):
    assert 8 * coded_bytes(density) == pytest.approx(bits, abs=0.01)
    k = round(density * N)
    nbytes = predict("gtopk", N, k, 8, ETHERNET, IDLE, indices="coded").nbytes
    assert nbytes == pytest.approx(6 * k * (4 + bits / 8), rel=1e-3)


def test_a_node_sends_once_what_its_ranks_have_in_common():
    node = Node(8, Link(2e-6, 1e-11))
    flat, nested = (predict(name, N, K, 64, ETHERNET, CORE, node=node) for name in ("topka", "hierarchical"))
    assert nested.nbytes < flat.nbytes / 5
    assert predict("hierarchical", N, K, 8, ETHERNET, CORE, node=node).bandwidth < flat.bandwidth / 100

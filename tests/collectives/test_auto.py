"""Auto: the same honest choice on every rank, once for each size and k."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from exchanges import every_way
from laws import Case, check_exchange, content, digest_of, everywhere, make, own_vector, same_bits

from horovod_sparse.collectives import auto
from horovod_sparse.costs.accuracy import KEEP, sums
from horovod_sparse.costs.measure import measure_compute, measure_network
from horovod_sparse.costs.network import Link

pytestmark = pytest.mark.law

SIZE, K = 1_000_000, 10_000


def test_dense_wins_on_a_fast_network(transport, network):
    network("fast")
    collective = make(transport, "auto")
    assert everywhere(transport, collective.decide(SIZE, K) and collective.choice == "dense")


def test_sparse_wins_on_a_slow_network_and_dense_at_a_high_density(transport, network):
    network("slow")
    collective, choices = make(transport, "auto"), []
    for k in (10, SIZE - 10, 10):
        asked = collective.decide(SIZE, k)
        choices.append(collective.choice)
        assert asked == (collective.choice == "dense")
    assert everywhere(transport, choices[0] == choices[2] and choices[1] == "dense")
    assert everywhere(transport, choices[0] != "dense" or transport.size == 1)


def test_measured_costs_lead_to_the_same_choice_on_every_rank(transport):
    collective = make(transport, "auto")
    for size, k in ((1000, 10), (SIZE, K), (SIZE, SIZE // 3), (SIZE, 0)):  # 0: all of it is held
        collective.decide(size, k)
        assert len(set(transport.allgather_object(collective.choice))) == 1
    check_exchange(transport, collective, Case(1000, "random"))


def test_exchanges_that_are_constructed_before_any_step_have_the_same_figures(transport):
    """Connections differ. The second exchange inherits the measurements of the first, so that both choose alike."""
    figures, earlier = [], []
    for _ in range(2):
        connection = transport.duplicate()
        earlier.append(connection.inherit(earlier))
        collective = make(connection, "auto")
        figures.append(collective._figures() if transport.size > 1 else None)
    assert everywhere(transport, figures[0] == figures[1])


@pytest.mark.parametrize("settings", [{}, {"adaptive": True}, {"keep": 8}])
def test_all_candidates_are_equally_accurate_and_priced_as_they_are_run(transport, network, monkeypatch, settings):
    """gTopk, SparDL and Ok-Topk without keep are left out: they return most of what they cut to its senders."""
    network("slow")
    priced, table = [], auto.table
    monkeypatch.setattr(auto, "table", lambda *given: priced.append(given[-1]) or table(*given))
    collective = make(transport, "auto", node_ranks=2, **settings)
    collective.decide(SIZE, K)
    parts, kept = collective._collectives, settings.get("keep", sums("auto", transport.size, "adaptive" in settings))
    assert everywhere(transport, {*parts} - {"hierarchical"} == {"topka", "topkdsa", "oktopk"})
    assert everywhere(transport, parts["oktopk"]._keep == kept and set(priced) <= {kept})
    if "hierarchical" in parts:
        assert parts["hierarchical"]._options.outer == parts["oktopk"]._options


@pytest.mark.parametrize("keep", [None, 2, 3.9])
def test_fewer_sums_than_are_equally_accurate_are_refused(keep):
    with pytest.raises(
        ValueError, match=f"keep must be at least 4, or 'auto', not {keep}: .*collective=oktopk takes any"
    ):
        auto.Auto.Options(keep=keep)


@pytest.mark.mpi
def test_auto_decides_once_per_size_and_k_and_rank_0_logs_the_table_of_each_choice(
    transport, network, monkeypatch, caplog
):
    network("slow")
    calls, table = [], auto.table
    monkeypatch.setattr(auto, "table", lambda *args, **named: calls.append(args[:2]) or table(*args, **named))
    collective, numbers = (
        make(transport, "auto"),
        [(SIZE, K), (SIZE, K), (SIZE, K + 1), (SIZE // 2, 2 * K), (SIZE // 2, 2 * K), (SIZE, K)],
    )
    choices = []
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        for size, k in numbers:
            collective.decide(size, k)
            choices.append(collective.choice)
    assert calls == ([numbers[0], *numbers[2:4]] if transport.size > 1 else [])
    logs = [record.getMessage() for record in caplog.records]
    assert len(logs) == (len(set(choices)) if transport.rank == 0 and transport.size > 1 else 0)
    assert all(name in log for log in logs for name in ("dense", "topka", "topkdsa", "oktopk", "chosen"))


def test_an_algorithm_keeps_its_state_while_another_one_runs(transport, network):
    """Ok-Topk continues with its thresholds; the bytes of both algorithms are counted."""
    network("slow")
    collective, other = make(transport, "auto"), make(transport, "topkdsa")
    alone = make(transport, "oktopk", keep=KEEP)
    for step in range(8):
        vector = own_vector(Case(5000, "same indices", seed=step), transport)
        collective.choice = "oktopk" if step % 2 else "topkdsa"
        reduced = collective.allreduce(vector, 50)
        expected = (alone if step % 2 else other).allreduce(vector, 50)
        assert digest_of(reduced.total, reduced.returned) == digest_of(expected.total, expected.returned)
    assert collective.traffic.bytes_sent == alone.traffic.bytes_sent + other.traffic.bytes_sent


@pytest.mark.parametrize("node_ranks", [1, 2, 3])
def test_nodes_of_several_ranks_are_measured_and_may_sum_first(transport, monkeypatch, node_ranks):
    compute, ranks = measure_compute(transport.channel(), np.empty(0, np.float32)), transport.size
    monkeypatch.setattr(auto, "measure_compute", lambda *_: compute)
    collective = make(transport, "auto", node_ranks=node_ranks)
    alone = make(transport, "hierarchical", node_ranks=node_ranks, keep=KEEP)
    collective.decide(SIZE, K)
    nested = node_ranks > 1 and ranks > node_ranks and ranks % node_ranks == 0
    assert everywhere(transport, ("hierarchical" in collective.state_dict()["states"]) == nested)
    if nested:
        link, node = measure_network(transport, transport.by_node(node_ranks), np.empty(0, np.float32))  # as known
        vector = own_vector(Case(5000, "random", seed=1), transport)
        assert same_bits(transport, np.array([link.alpha, link.beta, node.link.alpha, node.link.beta]))
        assert node.ranks == node_ranks
        collective.choice, before = "hierarchical", collective.traffic.bytes_sent
        reduced, expected = collective.allreduce(vector, 50), alone.allreduce(vector, 50)
        assert digest_of(reduced.total, reduced.returned) == digest_of(expected.total, expected.returned)
        assert collective.traffic.bytes_sent - before == alone.traffic.bytes_sent


@pytest.mark.mpi
def test_one_rank_sends_dense_without_a_log(transport, caplog):
    alone = transport.by_node(1).own
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        collective = make(alone, "auto")
        assert collective.decide(SIZE, K)
    assert (collective.choice, caplog.records) == ("dense", [])


@pytest.mark.mpi
@every_way
def test_auto_measures_for_the_buckets_dtype_device_and_wire_format(transport, monkeypatch, put):
    likes, widths = [], []
    table, compute = auto.table, auto.measure_compute(transport.channel(), np.empty(0, np.float32))
    monkeypatch.setattr(auto, "measure_network", lambda *given: likes.append(given[2]) or (Link(50e-6, 8e-9), None))
    monkeypatch.setattr(auto, "measure_compute", lambda *_: compute)
    monkeypatch.setattr(auto, "table", lambda *args: widths.append(args[8]) or table(*args))
    for dtype, wire in (("float32", None), ("float32", "bfloat16"), ("float64", "float32")):
        make(transport, "auto", dtype, put, wire=wire).decide(SIZE, K)
    there = type(put(np.empty(0)))
    several = transport.size > 1
    # When it is constructed, and as known when it decides.
    assert [(type(one), str(one.dtype)) for one in likes] == several * [
        *4 * [(there, "float32")],
        *2 * [(there, "float64")],
    ]
    assert widths == several * [4, 2, 4]


def test_a_state_with_another_choice_is_refused(transport):
    collective = make(transport, "auto")
    with pytest.raises(ValueError, match=r"choice of auto must be one of dense, topka, .*, not 'gtopk'"):
        collective.load_state_dict({**collective.state_dict(), "choice": "gtopk"})


def test_a_restored_choice_stays_in_force_with_the_states_of_all_algorithms(transport, network):
    network("slow")
    one, other = make(transport, "auto"), make(transport, "auto")
    one.choice = "oktopk"
    one.allreduce(own_vector(Case(5000, "random", seed=1), transport), 50)
    one.decide(SIZE, K)
    other.load_state_dict(one.state_dict())
    assert everywhere(transport, content(other.state_dict()) == content(one.state_dict()))
    network("fast")
    other.decide(SIZE, K)
    assert everywhere(transport, other.choice == one.choice)

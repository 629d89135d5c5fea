"""Auto: the same honest choice on every rank."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere

from horovod_sparse.collectives import Auto, auto
from horovod_sparse.costmodel import Compute
from horovod_sparse.network import Link

pytestmark = [pytest.mark.mpi, pytest.mark.law]

SIZE, K = 1_000_000, 10_000
COMPUTE = Compute(select=0.4e-9, accumulate=0.3e-9, reduce=0.3e-9, merge=3e-9)
SLOW, FAST = Link(50e-6, 8e-9), Link(1e-6, 8e-13)  # 1 Gbit/s, 10 Tbit/s


@pytest.fixture
def network(monkeypatch):
    def install(link):
        monkeypatch.setattr(auto, "measure_link", lambda comm, like: link)
        monkeypatch.setattr(auto, "measure_compute", lambda like, comm: COMPUTE)

    return install


def test_dense_wins_on_a_fast_network_and_asks_for_everything(comm, network):
    network(FAST)
    collective = Auto(comm)
    assert everywhere(comm, collective.entries(SIZE, K) == SIZE and collective.choice == "dense")


def test_sparse_wins_on_a_slow_network(comm, network):
    network(SLOW)
    collective = Auto(comm)
    asked = collective.entries(SIZE, K)
    assert everywhere(comm, (asked == K and collective.choice != "dense") or comm.Get_size() == 1)


def test_another_density_may_lead_to_another_choice(comm, network):
    network(SLOW)
    collective, choices = Auto(comm), []
    for k in (10, SIZE // 2, 10):
        collective.entries(SIZE, k)
        choices.append(collective.choice)
    assert everywhere(comm, choices[0] == choices[2])
    assert everywhere(comm, choices[1] == "dense" and (choices[0] != "dense" or comm.Get_size() == 1))


def test_what_was_measured_decides_alike_on_every_rank(comm):
    collective = Auto(comm)
    for size, k in ((1000, 10), (SIZE, K), (SIZE, SIZE // 3)):
        collective.entries(size, k)
        assert len(set(comm.allgather(collective.choice))) == 1
    check_exchange(comm, collective, Case(1000, "random", seed=1))


def test_rank_0_logs_the_table_once_for_each_choice(comm, network, caplog):
    network(SLOW)
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        collective = Auto(comm)
        for _ in range(3):
            collective.entries(SIZE, K)
    logs = [record.getMessage() for record in caplog.records]
    assert len(logs) == (comm.Get_rank() == 0 and comm.Get_size() > 1)
    assert all(name in log for log in logs for name in ("dense", "topka", "topkdsa", "gtopk", "oktopk", "fastest"))


def test_one_rank_is_dense_and_silent(comm, caplog):
    alone = comm.Split(comm.Get_rank())
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        collective = Auto(alone)
        assert collective.entries(SIZE, K) == SIZE
    assert collective.choice == "dense"
    assert caplog.records == []
    alone.Free()


def test_the_prediction_knows_the_format_of_the_wire(comm, network, monkeypatch):
    network(SLOW)
    widths = []

    def table(*args, wire):
        widths.append(wire)
        return costs(*args, wire=wire)

    costs = auto.table
    monkeypatch.setattr(auto, "table", table)
    for wire in (None, "float32", "bfloat16"):
        Auto(comm, wire=wire).entries(SIZE, K)
    assert widths == ([4, 4, 2] if comm.Get_size() > 1 else [])


def test_traffic_counts_what_earlier_choices_sent(comm, network):
    network(SLOW)
    collective = Auto(comm)
    check_exchange(comm, collective, Case(100_000, "random", seed=1, share=0.001))
    before = collective.traffic.bytes_sent
    collective.entries(100_000, 90_000)
    assert collective.traffic.bytes_sent == before


def test_a_restored_choice_stays_in_force(comm, network):
    network(SLOW)
    one, other = Auto(comm), Auto(comm)
    one.entries(SIZE, K)
    other.load_state_dict(one.state_dict())
    network(FAST)
    other.entries(SIZE, K)
    assert everywhere(comm, other.choice == one.choice)


def test_a_bucket_that_is_held_altogether_has_no_entries(comm, network):
    network(SLOW)
    collective = Auto(comm)
    collective.entries(SIZE, 0)
    assert np.isfinite(collective.traffic.bytes_sent)

"""Measured figures are the same on every rank, are the slowest rank's, and are measured once."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from exchanges import every_device
from laws import everywhere
from mpi4py import MPI

from horovod_sparse.costs import measure
from horovod_sparse.costs.measure import measure_compute, measure_link
from horovod_sparse.costs.model import Compute
from horovod_sparse.costs.network import Link, Network
from horovod_sparse.transport.mpi import MPITransport

pytestmark = [pytest.mark.mpi, pytest.mark.law]

FLOAT32, FLOAT64 = np.empty(0, np.float32), np.empty(0, np.float64)


@pytest.fixture
def fresh(transport):
    """A transport that has measured nothing yet."""
    return transport.duplicate()


class Wire:
    """Fake link, whose time passes in ``clock`` only."""

    def __init__(self, alpha, beta):
        self.alpha, self.beta, self.clock = alpha, beta, 0.0

    def seconds(self, transport, nbytes, like, repeat=1):
        one = self.alpha + nbytes * self.beta
        self.clock += measure._ROUNDS * repeat * one
        return one


@every_device
def test_figures_are_times_with_the_same_bits_everywhere_measured_once(transport, fresh, put, monkeypatch):
    few = {"_ELEMENTS": 1 << 10, "_KERNEL_SECONDS": 1e-6, "_BYTES": (1 << 12, 1 << 14), "_PINGS": 2, "_ROUNDS": 1}
    for figure, value in few.items():
        monkeypatch.setattr(measure, figure, value)
    likes = [put(one) for one in (FLOAT32, FLOAT64)]
    figures = [(measure_link(fresh, like), measure_compute(fresh, like)) for like in likes]
    for link, compute in figures:
        assert everywhere(transport, transport.broadcast_object((link, compute)) == (link, compute))
        assert all(0 < one < 1 for name, one in vars(compute).items() if name not in ("reduce", "wait"))
        assert 0 <= compute.reduce < 1
        assert compute.wait == 0  # a message between devices includes it
        assert transport.size == 1 or (0 < link.alpha < 1 and 0 <= link.beta < 1e-3)
    monkeypatch.setattr(measure, "_seconds", lambda *_: pytest.fail("measured again"))
    for like, (link, compute) in zip(likes, figures, strict=True):
        assert measure_link(fresh, like) is link
        assert measure_compute(fresh.channel(), like) is compute


def test_the_real_figures_are_plausible_and_known_in_seconds(transport, fresh):
    begin = time.monotonic()
    compute = measure_compute(fresh, FLOAT32)
    assert time.monotonic() - begin < 10
    assert all(0 <= one < 1e-3 for one in vars(compute).values())
    assert measure_link(MPITransport(MPI.COMM_SELF)) == Link(0, 0)


@every_device
def test_figures_of_one_communicator_dtype_or_device_are_not_those_of_another(fresh, put, monkeypatch):
    monkeypatch.setattr(measure, "_measure_link", lambda _, like: Link(1, 1))
    monkeypatch.setattr(measure, "_measure_compute", lambda _, like, sharing: Compute(1, 1, 1, like.itemsize, 1))
    assert measure_link(fresh, put(FLOAT32)) == Link(1, 1)
    assert measure_compute(fresh, put(FLOAT32)).merge == 4
    assert measure_compute(fresh, put(FLOAT64)).merge == 8
    monkeypatch.setattr(measure, "_measure_link", lambda _, like: Link(2, 2))
    assert measure_link(fresh.duplicate(), put(FLOAT32)) == Link(2, 2)
    assert measure_link(fresh, put(FLOAT32)) == Link(1, 1)
    same_device = isinstance(put(FLOAT32), np.ndarray)
    assert measure_link(fresh) == (Link(1, 1) if same_device else Link(2, 2))


@pytest.mark.parametrize(("alpha", "rate"), [(1e-6, 10e6), (1e-6, 100e9), (30e-6, 1e9), (1e-3, 10e6), (1e-3, 100e9)])
def test_links_of_any_speed_are_measured_in_under_a_second(fresh, monkeypatch, rate, alpha):
    wire = Wire(alpha, beta=8 / rate)
    monkeypatch.setattr(measure, "_message_seconds", wire.seconds)
    link = measure_link(fresh)
    if fresh.size > 1:
        assert wire.clock < 1
        assert link.alpha == pytest.approx(alpha + 8 * 8 / rate)
        assert link.beta == pytest.approx(8 / rate, rel=0.01)


@pytest.mark.parametrize(("rate", "per_element"), [(10e6, 0.0), (1e9, 1e-9), (100e9, 0.0), (100e9, 1e-9)])
def test_a_dense_allreduce_is_charged_for_what_the_link_does_not_explain(fresh, monkeypatch, rate, per_element):
    if fresh.size == 1:
        assert measure_compute(fresh, FLOAT32).reduce == 0
        return
    wire = Wire(1e-6, beta=8 / rate)
    monkeypatch.setattr(measure, "_message_seconds", wire.seconds)
    network = Network(fresh.size, measure_link(fresh))

    def allreduce(transport, nbytes, like):
        known = sum(one.bandwidth + one.latency for one in network.sum(nbytes))
        seconds = known + per_element * network.others * nbytes / like.itemsize
        wire.clock += measure._ROUNDS * seconds
        return seconds

    monkeypatch.setattr(measure, "_allreduce_seconds", allreduce)
    assert measure._reduce_seconds(fresh, FLOAT32) == pytest.approx(per_element, rel=1e-3, abs=1e-14)
    assert wire.clock < 1.5


def test_the_slowest_rank_counts_on_every_rank(transport):
    last = transport.rank == transport.size - 1
    seconds = measure._seconds(transport.channel(), lambda: time.sleep(0.02 if last else 0), repeat=2)
    assert 0.02 <= seconds < 0.5
    assert everywhere(transport, transport.broadcast_object(seconds) == seconds)


def test_a_round_takes_as_long_as_on_its_slowest_rank(transport):
    """Another rank is slow in each round, so that each has a fast one."""
    calls = itertools.count()
    seconds = measure._seconds(
        transport.channel(), lambda: time.sleep(0.02 if next(calls) % transport.size == transport.rank else 0)
    )
    assert everywhere(transport, seconds >= 0.02)


def test_all_ranks_send_and_receive_alike(fresh, monkeypatch):
    sent, received = [], []
    send, receive = fresh.send, fresh.receive
    monkeypatch.setattr(fresh, "send", lambda message, rank: sent.append(rank) or send(message, rank))
    monkeypatch.setattr(fresh, "receive", lambda rank, like: received.append(rank) or receive(rank, like))
    measure._message_seconds(fresh, 64, FLOAT32, repeat=5)
    distance = max(1, (fresh.size - 1) // 2)
    assert set(sent) == {(fresh.rank + distance) % fresh.size}
    assert set(received) == {(fresh.rank - distance) % fresh.size}
    assert len(sent) == 5 * measure._ROUNDS

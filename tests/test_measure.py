"""Measured figures are the same on every rank, are the slowest rank's, and are measured once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from laws import everywhere

from horovod_sparse import measure
from horovod_sparse.costmodel import Compute
from horovod_sparse.measure import measure_compute, measure_link
from horovod_sparse.network import Link

pytestmark = [pytest.mark.mpi, pytest.mark.law]

FLOAT32, FLOAT64 = np.empty(0, np.float32), np.empty(0, np.float64)


@pytest.fixture
def fresh(comm):
    """A communicator that has measured nothing yet."""
    mine = comm.Dup()
    yield mine
    mine.Free()


@pytest.fixture(scope="module")
def measured(comm):
    """A communicator that has measured everything."""
    mine = comm.Dup()
    measure_link(mine)
    for like in (FLOAT32, FLOAT64):
        measure_compute(like, mine)
    yield mine
    mine.Free()


class Wire:
    """Stands for the exchange of messages: a link whose time passes in ``clock`` alone."""

    def __init__(self, alpha, beta):
        self.alpha, self.beta, self.clock = alpha, beta, 0.0

    def seconds(self, comm, nbytes, like, repeat=1):
        one = self.alpha + nbytes * self.beta
        self.clock += measure._ROUNDS * repeat * one
        return one


def test_every_rank_holds_the_same_bits(measured):
    for figures in (measure_link(measured), measure_compute(FLOAT32, measured)):
        assert everywhere(measured, measured.bcast(figures) == figures)


def test_figures_are_times(measured):
    link = measure_link(measured)
    if measured.Get_size() > 1:
        assert 0 < link.alpha < 1
        assert 0 <= link.beta < 1e-3
    for like in (FLOAT32, FLOAT64):
        compute = measure_compute(like, measured)
        assert all(0 < seconds < 1e-3 for seconds in (compute.select, compute.accumulate, compute.merge, compute.cut))
        assert 0 <= compute.reduce < 1e-3


def test_one_rank_has_no_link():
    from mpi4py import MPI

    assert measure_link(MPI.COMM_SELF) == Link(0, 0)


def test_a_communicator_is_measured_once(measured, monkeypatch):
    link, compute = measure_link(measured), measure_compute(FLOAT32, measured)
    monkeypatch.setattr(measure, "_seconds", lambda *_: pytest.fail("measured again"))
    assert measure_link(measured) is link
    assert measure_compute(FLOAT32, measured) is compute


def test_figures_of_one_communicator_or_dtype_are_not_those_of_another(fresh, monkeypatch):
    monkeypatch.setattr(measure, "_measure_link", lambda comm, like: Link(1, 1))
    monkeypatch.setattr(measure, "_measure_compute", lambda like, comm: Compute(1, 1, 1, like.itemsize, 1))
    assert measure_link(fresh) == Link(1, 1)
    assert measure_compute(FLOAT32, fresh).merge == 4
    assert measure_compute(FLOAT64, fresh).merge == 8
    monkeypatch.setattr(measure, "_measure_link", lambda comm, like: Link(2, 2))
    copy = fresh.Dup()
    assert measure_link(copy) == Link(2, 2)
    assert measure_link(fresh) == Link(1, 1)
    copy.Free()


@pytest.mark.parametrize("rate", [10e6, 100e6, 1e9, 100e9])
@pytest.mark.parametrize("alpha", [1e-6, 30e-6, 1e-3])
def test_a_link_is_known_in_under_a_second_whatever_its_speed(fresh, monkeypatch, rate, alpha):
    wire = Wire(alpha, beta=8 / rate)
    monkeypatch.setattr(measure, "_message_seconds", wire.seconds)
    link = measure_link(fresh)
    if fresh.Get_size() > 1:
        assert wire.clock < 1
        assert link.alpha == pytest.approx(alpha + 8 * 8 / rate)
        assert link.beta == pytest.approx(8 / rate, rel=0.01)


@pytest.mark.parametrize("rate", [10e6, 1e9, 100e9])
@pytest.mark.parametrize("per_element", [0.0, 1e-9])
def test_a_dense_allreduce_is_charged_for_what_the_link_does_not_explain(fresh, monkeypatch, rate, per_element):
    ranks = fresh.Get_size()
    if ranks == 1:
        assert measure_compute(FLOAT32, fresh).reduce == 0
        return
    wire, others = Wire(1e-6, beta=8 / rate), (ranks - 1) / ranks
    monkeypatch.setattr(measure, "_message_seconds", wire.seconds)
    link = measure_link(fresh)

    def allreduce(comm, nbytes, like):
        messages = 2 * (ranks - 1).bit_length() * link.alpha
        seconds = 2 * nbytes * others * link.beta + messages + per_element * others * nbytes / like.itemsize
        wire.clock += measure._ROUNDS * seconds
        return seconds

    monkeypatch.setattr(measure, "_allreduce_seconds", allreduce)
    assert measure._reduce_seconds(fresh, FLOAT32) == pytest.approx(per_element, rel=1e-3, abs=1e-14)
    assert wire.clock < 1.5


def test_the_slowest_rank_counts_on_every_rank(comm):
    last = comm.Get_rank() == comm.Get_size() - 1
    seconds = measure._seconds(comm, lambda: time.sleep(0.02 if last else 0), repeat=2)
    assert 0.02 <= seconds < 0.5
    assert everywhere(comm, comm.bcast(seconds) == seconds)


def test_all_ranks_send_and_receive_alike(fresh):
    sent, received = [], []

    class Watched:
        """The communicator, with a list of who exchanges with whom."""

        def __getattr__(self, name):
            return getattr(fresh, name)

        def Sendrecv(self, outgoing, to, tag, incoming, origin, _):  # noqa: N802 - mpi4py's name
            sent.append(to)
            received.append(origin)
            fresh.Sendrecv(outgoing, to, tag, incoming, origin, tag)

    measure._message_seconds(Watched(), 64, FLOAT32, repeat=5)
    rank, ranks = fresh.Get_rank(), fresh.Get_size()
    distance = max(1, (ranks - 1) // 2)
    assert set(sent) == {(rank + distance) % ranks}
    assert set(received) == {(rank - distance) % ranks}
    assert len(sent) == 5 * measure._ROUNDS

"""Waiting: a rank that has no core to spare sleeps, with growing pauses, and notices at once when the wait is over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mpi4py import MPI

from horovod_sparse.transport import waiting
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.transport.waiting import SETTING, Waiting


@pytest.fixture
def pauses(monkeypatch):
    """Pauses, which take no time here."""
    made = []
    monkeypatch.setattr(waiting.time, "sleep", made.append)
    return made


@pytest.mark.parametrize(
    ("cores", "threads", "setting", "expected"),
    [
        (0.5, 1, "auto", True),
        (1, 2, "auto", True),
        (2, 2, "auto", False),
        (16, 17, "auto", True),
        (0.5, 2, "spin", False),
        (16, 2, "sleep", True),
    ],
)
def test_ranks_spin_where_they_have_a_core_more_than_they_compute_on(cores, threads, setting, expected):
    rank = Waiting({SETTING: setting})
    rank.share_cores(cores, threads)
    assert rank.sleeps == expected


def test_an_unknown_setting_is_named_once_and_ignored(caplog):
    ranks = [Waiting({SETTING: "maybe"}) for _ in range(2)]
    assert caplog.text.count("HOROVOD_SPARSE_WAIT is 'maybe', but must be auto, spin or sleep") == 1
    ranks[0].share_cores(1, 2)
    assert [rank.sleeps for rank in ranks] == [True, False]


def test_an_exchange_that_needs_fewer_threads_does_not_end_the_sleep():
    rank = Waiting({})
    for cores in (1, 8):
        rank.share_cores(cores, 2)
    assert rank.sleeps


def test_transports_made_from_one_wait_alike_and_others_for_themselves():
    transport = MPITransport(MPI.COMM_SELF)
    made = [transport.channel(), transport.duplicate(), *transport.by_node(1)[1:]]
    assert all(one.waiting is transport.waiting for one in made)
    assert MPITransport(MPI.COMM_SELF).waiting is not transport.waiting


@pytest.mark.parametrize(
    ("seconds", "interruptions", "setting", "expected"),
    [
        (1, 300, "auto", True),
        (1, 5, "auto", False),
        (0.1, 300, "auto", False),
        (60, 30_000, "auto", False),
        (1, 300, "spin", False),
    ],
)
def test_a_rank_that_others_interrupt_often_begins_to_sleep(monkeypatch, seconds, interruptions, setting, expected):
    """Ranks of other containers share the cores, but are not known."""
    rank = Waiting({SETTING: setting})
    clock, counts = iter([100.0, 100.0 + seconds]), iter([7, 7 + interruptions])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(waiting.resource, "getrusage", lambda _: SimpleNamespace(ru_nivcsw=next(counts)))
    for _ in range(2):
        rank.wait(lambda: True, lambda: True)
    assert rank.sleeps == expected


def test_messages_of_an_interrupted_wait_stay_alive(monkeypatch):
    monkeypatch.setattr(waiting, "_abandoned", [])

    def poll():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Waiting({SETTING: "sleep"}).wait(poll, poll)
    assert waiting._abandoned == [poll]


def test_spinning_ranks_block_in_mpi(pauses):
    assert Waiting({}).wait(lambda: pytest.fail("polled"), lambda: "done") == "done"
    assert not pauses


def test_pauses_grow_up_to_a_limit_and_are_skipped_if_the_message_is_there(pauses):
    rank = Waiting({SETTING: "sleep"})
    assert rank.wait(lambda: "there", lambda: pytest.fail("blocked")) == "there"
    assert not pauses
    assert rank.wait(lambda: len(pauses) >= 10 and "done", lambda: pytest.fail("blocked")) == "done"
    assert pauses[0] == waiting._FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == waiting._LAST_PAUSE


def test_a_given_pause_overrides_the_choice(pauses):
    assert Waiting({}).wait(lambda: len(pauses) == 3, lambda: pytest.fail("blocked"), pause=0.25)
    assert pauses == [0.25] * 3

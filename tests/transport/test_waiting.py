"""Waiting: a rank that has no core to spare sleeps, with growing pauses, and notices at once when the wait is over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod_sparse.transport import waiting
from horovod_sparse.transport.waiting import choose, wait


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(waiting, "sleeps", False)
    monkeypatch.setattr(waiting, "_observes", True)
    monkeypatch.setattr(waiting, "_last", (0.0, 0))


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
    choose(cores, threads, {waiting.SETTING: setting})
    assert waiting.sleeps == expected


def test_an_unknown_setting_is_named_and_ignored_and_another_exchange_does_not_end_the_sleep(caplog):
    for cores in (1, 8):
        choose(cores, 2, {waiting.SETTING: "maybe"})
    assert caplog.text.count("HOROVOD_SPARSE_WAIT is 'maybe', but must be auto, spin or sleep") == 1
    assert waiting.sleeps


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
    choose(8, 2, {waiting.SETTING: setting})
    clock, counts = iter([100.0, 100.0 + seconds]), iter([7, 7 + interruptions])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(waiting.resource, "getrusage", lambda _: SimpleNamespace(ru_nivcsw=next(counts)))
    for _ in range(2):
        wait(lambda: True, lambda: True)
    assert waiting.sleeps == expected


def test_messages_of_an_interrupted_wait_stay_alive(monkeypatch):
    monkeypatch.setattr(waiting, "sleeps", True)
    monkeypatch.setattr(waiting, "_abandoned", [])

    def poll():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait(poll, poll)
    assert waiting._abandoned == [poll]


def test_spinning_ranks_block_in_mpi(pauses):
    assert wait(lambda: pytest.fail("polled"), lambda: "done") == "done"
    assert not pauses


def test_pauses_grow_up_to_a_limit_and_are_skipped_if_the_message_is_there(monkeypatch, pauses):
    monkeypatch.setattr(waiting, "sleeps", True)
    assert wait(lambda: "there", lambda: pytest.fail("blocked")) == "there"
    assert not pauses
    assert wait(lambda: len(pauses) >= 10 and "done", lambda: pytest.fail("blocked")) == "done"
    assert pauses[0] == waiting._FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == waiting._LAST_PAUSE


def test_a_given_pause_overrides_the_choice(pauses):
    assert wait(lambda: len(pauses) == 3, lambda: pytest.fail("blocked"), pause=0.25)
    assert pauses == [0.25] * 3

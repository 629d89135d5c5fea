"""GraVAC: the three-way rule, scaling up by saturation, and settling."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import made

from horovod_sparse.rules import Step
from horovod_sparse.schedules import GraVAC


def factors(schedule):
    """Compression factors of the lowest density in force and of the candidate."""
    return [pytest.approx(1 / density) for density in schedule.densities(Step())]


def window(schedule, gains, steps=4):
    return [schedule.choose(gains) for _ in range(steps)]


def build(**options):
    return made(GraVAC, 10, 0.1, **{"cf_max": 80.0, "window": 4, "eps": 0.7, "omega": 0.01, **options})


@pytest.mark.parametrize(
    ("gains", "expected"), [((0.9, 0.8), 1), ((0.9, 0.7), 1), ((0.9, 0.69), 0), ((0.7, 0.1), 0), ((0.69, 0.1), None)]
)
def test_the_candidate_is_sent_if_its_gain_suffices_else_the_lowest_else_everything(gains, expected):
    assert build().choose(gains) == expected


def test_the_lowest_factor_rises_to_a_candidate_that_loses_nothing():
    schedule = build()
    assert factors(schedule) == [10, 20]
    window(schedule, (0.9, 0.9))
    assert factors(schedule) == [20, 40]


def test_a_window_is_judged_by_its_mean():
    schedule = build()
    for gains in ((0.9, 0.7), (0.9, 0.9), (0.9, 1.1), (0.9, 0.9)):
        schedule.choose(gains)
    assert factors(schedule)[0] == 20


def test_when_all_are_seen_the_smallest_is_settled_on_whose_gain_times_throughput_is_close_to_the_best(monkeypatch):
    """Throughput doubles from 20 to 40 and hardly more to 80; gains are about the same."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    schedule = build()
    for seconds, gain in ((4.0, 0.80), (2.0, 0.80), (1.99, 0.80)):
        now[0] += seconds
        window(schedule, (0.9, gain))
    assert factors(schedule) == [10, 40]
    window(schedule, (0.9, 0.9), steps=50)
    assert factors(schedule) == [10, 40]
    assert schedule.choose((0.6, 0.5)) is None  # too little gain still sends everything


def test_the_last_candidate_is_cf_max():
    schedule, seen = build(cf_max=70.0), []
    for _ in range(3):
        seen.append(1 / schedule.densities(Step())[1])
        window(schedule, (0.9, 0.8))
    assert seen == pytest.approx([20, 40, 70])


@settings(max_examples=40)
@given(
    gains=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: (max(pair), min(pair))), max_size=60)
)
def test_a_restored_one_goes_on_and_factors_stay_in_their_range(gains):
    one = build()
    for pair in gains:
        state, other = one.state_dict(), build()
        other.load_state_dict(state)
        assert other.densities(Step()) == one.densities(Step())
        assert other.choose(pair) == one.choose(pair)
        lowest, candidate = (1 / density for density in one.densities(Step()))
        assert 10 * 0.999 <= lowest <= candidate * 1.001 <= 80 * 1.002

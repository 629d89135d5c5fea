"""GraVAC: one decision for the model by moving averages, the search for a factor, and settling."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.schedules import GraVAC, Measured
from horovod_sparse.schedules.trials import Trials

WINDOW = 4


@pytest.fixture
def clock(monkeypatch):
    """Provide a clock that tests advance."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def build(buckets=1, context=None, **options):
    """Return the schedules of one model's buckets, by bucket number."""
    context = {"shared": {}, **(context or {})}
    options = {"cf_max": 80.0, "window": WINDOW, "eps": 0.7, "omega": 0.01, **options}
    return [made(GraVAC, BucketContext(10, LIKE, bucket, **context), 0.1, **options) for bucket in range(buckets)]


def step(schedules, gains, norm=1.0, rest=0.0, **conditions):
    """A step in which each bucket's gradient has a norm, and both factors' entries the gains' share of its square.

    Gains are the two factors', or given by factor.

    Returns:
        The factor that was sent: None, everything.
    """
    gradients, chosen = [(0, np.array([norm]))], set()
    for schedule in schedules:
        factors = [round(1 / one) for one in schedule.densities(Step(gradients=gradients, **conditions))]
        pair = [gains[factor] for factor in factors] if isinstance(gains, dict) else gains
        number, _ = schedule.choose([gain * norm**2 for gain in pair], lambda: rest)
        chosen.add(None if number is None else factors[number])
    assert len(chosen) == 1  # one decision for all buckets
    return chosen.pop()


def steps(schedules, gains, count=WINDOW, **more):
    return [step(schedules, gains, **more) for _ in range(count)]


def factors(schedules):
    """Compression factors of the lowest density in force and of the candidate, in the next step."""
    search = schedules[0]._search
    return [round(search.lowest), round(search.candidate)]


# --- the three-way rule ---


@pytest.mark.parametrize(
    ("gains", "expected"),
    [((0.9, 0.8), 20), ((0.9, 0.71), 20), ((0.9, 0.69), 10), ((0.71, 0.1), 10), ((0.69, 0.1), None)],
)
def test_candidate_order(gains, expected):
    schedules = build()
    assert steps(schedules, gains) == [10] * WINDOW
    assert steps(schedules, gains, WINDOW) == [expected] * WINDOW


@pytest.mark.parametrize(("gain", "expected"), [("gradient", 20), ("accumulated", None)])
def test_a_gain_is_a_share_of_the_gradient_or_of_what_is_accumulated(gain, expected):
    """The entries' squares are 0.8 and 0.75; those of the gradient are 1, and 3 of residual and gradient together."""
    assert steps(build(gain=gain), (0.8, 0.75), WINDOW + 1, rest=2.2)[-1] == expected


def test_gains_are_moving_averages_over_the_window():
    """A single step weighs 2 / (window + 1) of the average, and decides about later steps, not its own."""
    schedules = build(window=99, cf_max=1e6)
    assert steps(schedules, (0.9, 0.8), 190)[-1] == 20
    assert step(schedules, (0.0, 0.0)) == 20
    assert step(schedules, (0.9, 0.8)) == 20
    average = schedules[0]._search.gains[0]
    assert average == pytest.approx(0.9 * (1 - 0.02), abs=1e-3)
    sent = steps(schedules, (0.0, 0.0), 40)
    # 0.9 (1 - 2/100)^n falls below 0.7 after 12 or 13 more steps.
    assert 11 <= sent.index(None) <= 13
    assert set(sent[sent.index(None) :]) == {None}


def test_the_loss_scale_does_not_change_the_averages():
    schedules = build()
    steps(schedules, (0.9, 0.9), 2 * WINDOW)
    unscaled = schedules[0]._search.state_dict()["averages"]
    scaled = build()
    for number in range(2 * WINDOW):
        loss_scale = 1024.0 if number % 3 else 1.0
        step(scaled, (0.9, 0.9), norm=loss_scale, loss_scale=loss_scale)
    assert scaled[0]._search.state_dict()["averages"] == unscaled


# --- one model ---


@given(
    gains=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (max(pair), min(pair))), max_size=60
    )
)
@settings(max_examples=40)
def test_several_buckets_decide_like_one_with_all_parameters(gains):
    """Some steps leave out a bucket whose gradient was not finite. Sums are exact."""
    several, one = build(4), build()
    with pytest.MonkeyPatch.context() as patch:  # the search settles by the seconds of steps
        for number, pair in enumerate(gains):
            patch.setattr("time.perf_counter", lambda now=number: float(now))
            pair = [gain / 8 for gain in pair]
            taking_part = several if number % 5 else several[:: 1 + number % 2]
            assert step(taking_part, pair) == step(one, pair, norm=math.sqrt(len(taking_part)))
            assert factors(several) == factors(one)


def test_a_step_takes_one_message_for_any_number_of_buckets():
    messages = []
    context = {"ranks": 3, "consensus": lambda array: messages.append(array) or 3 * array}
    steps(build(5, context), (0.9, 0.8), 11)
    assert len(messages) == 10  # the last step is told in the next one


def test_a_bucket_that_is_added_later_takes_part():
    context = {"shared": {}}
    steps(build(2, context), (0.9, 0.8), 3)
    assert steps(build(3, context), (0.9, 0.8), 3) == [10, 20, 20]


def test_ranks_that_idle_do_not_lower_the_averages():
    """Half of the ranks stop: averages and decisions are the same as without them."""
    busy, alone = [4], build(cf_max=1e6)
    context = {"ranks": 4, "consensus": lambda sums: np.append(busy[0] * sums[:-1], 4 * sums[-1])}
    among_others = build(1, context, cf_max=1e6)
    for number in range(10 * WINDOW):
        busy[0] = 4 if number < WINDOW or number % 7 == 0 else 2
        assert step(among_others, (0.8, 0.75)) == step(alone, (0.8, 0.75))
    assert among_others[0]._search.gains == alone[0]._search.gains


# --- the search ---


def test_the_lowest_factor_rises_to_a_candidate_that_loses_nothing():
    schedules = build()
    steps(schedules, (0.9, 0.9), 2 * WINDOW + 1)
    assert factors(schedules) == [20, 40]
    steps(schedules, (0.9, 0.5), WINDOW)
    assert factors(schedules) == [20, 80]


def test_each_candidate_has_its_own_window(clock):
    schedules = build(cf_max=70.0)
    candidates = []
    for _ in range(4 * WINDOW + 1):
        step(schedules, (0.9, 0.8))
        candidates.append(factors(schedules)[1])
    # The first window has none of its own. A step counts in the next one.
    assert candidates == [20] * 2 * WINDOW + [40] * WINDOW + [70] * WINDOW + [factors(schedules)[1]]


def sent(schedules, clock, seconds_of, gains_of, count, gap=None):
    """Run steps whose time depends on the factor; return the factors."""
    chosen = []
    for number in range(count):
        factor = step(schedules, gains_of)
        clock[0] += seconds_of[factor]
        if gap is not None and number % gap == 0:
            clock[0] += 1000.0
        chosen.append(factor)
    return chosen


SECONDS = {None: 9.0, 10: 8.0, 20: 4.0, 40: 2.0, 80: 1.99}
GAINS = {10: 0.95, 20: 0.8, 40: 0.8, 80: 0.8}


@pytest.mark.parametrize("gap", [None, 3])
def test_the_search_settles_on_the_smallest_factor_close_to_the_best_product(clock, gap):
    """Throughput doubles from 20 to 40 and hardly more to 80. Time between steps does not count."""
    schedules = build(window=10)
    sent(schedules, clock, SECONDS, GAINS, 41, gap)
    assert factors(schedules) == [10, 40]
    assert set(sent(schedules, clock, SECONDS, GAINS, 300, gap)[1:]) == {40}
    assert factors(schedules) == [10, 40]
    steps(schedules, (0.5, 0.4), 100)
    assert step(schedules, (0.5, 0.4)) is None  # too little gain still sends everything


def test_throughput_belongs_to_the_factor_that_was_sent(clock):
    """80 is tried once without enough gain; the rest of its window has the times of other factors."""
    schedules = build(window=10)
    seconds, gains = {10: 8.0, 20: 4.0, 40: 6.0, 80: 4.0}, {10: 0.95, 20: 0.8, 40: 0.71, 80: 0.1}
    assert sent(schedules, clock, seconds, gains, 41).count(80) == 1
    assert factors(schedules) == [10, 20]


def test_without_a_candidate_of_sufficient_gain_the_lowest_is_chosen(clock):
    schedules = build(window=10)
    chosen = sent(schedules, clock, dict.fromkeys(SECONDS, 8.0), {10: 0.95, 20: 0.5, 40: 0.5, 80: 0.3}, 41)
    assert chosen.count(10) == 39  # 40 and 80 are tried once
    assert factors(schedules) == [10, 10]


@pytest.mark.parametrize(("everything", "expected"), [(9.0, 10), (18.0, 20), (35.0, 40), (900.0, 80)])
def test_with_equal_gains_time_decides_as_in_measured(clock, everything, expected):
    """The largest density whose steps take no longer than the shortest ones."""
    schedules = build(window=10)
    seconds = {factor: max(1.0, everything / (factor or 1)) for factor in (None, 10, 20, 40, 80)}
    sent(schedules, clock, seconds, dict.fromkeys((10, 20, 40, 80), 0.9), 60)
    assert factors(schedules)[1] == expected
    options = Measured.Options(densities=(1 / 10, 1 / 20, 1 / 40, 1 / 80))
    trials = Trials(options, clock=lambda: clock[0])
    for _ in range(110):
        density = trials.begin(BucketContext(10, LIKE)).density
        clock[0] += seconds[round(1 / density)]
    assert round(1 / density) == expected


# --- state ---


@settings(max_examples=40)
@given(
    gains=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)).map(lambda pair: (max(pair), min(pair))), max_size=60),
    restored=st.sets(st.integers(0, 59)),
)
def test_a_restored_schedule_continues_and_factors_stay_in_range(gains, restored):
    """Compared until it settles, which depends on times."""
    one, other = build(2, cf_max=1e6), build(2, cf_max=1e6)
    for number, pair in enumerate(gains):
        if number in restored:
            states, other = [schedule.state_dict() for schedule in other], build(2, cf_max=1e6)
            for schedule, state in zip(other, states, strict=True):
                schedule.load_state_dict(state)
        assert step(one, pair) == step(other, pair)
        lowest, candidate = factors(one)
        assert factors(other) == [lowest, candidate]
        assert 10 <= lowest <= candidate


@pytest.mark.parametrize("buckets", [1, 3])
def test_an_undone_step_does_not_change_the_state(buckets):
    """Including steps that end a window. Buckets are undone in reverse order."""
    one, other = build(buckets, cf_max=1e6), build(buckets, cf_max=1e6)
    for number in range(5 * WINDOW):
        pair = (0.9, 0.9 - 0.01 * (number % 7))
        assert step(one, pair) == step(other, pair)
        for done in range(1, buckets + 1):
            states = []
            for schedule in one[:done]:
                states.append(schedule.state_dict())
                schedule.densities(Step(gradients=[(0, np.ones(1))]))
                schedule.choose([7.0, 7.0], lambda: 0.0)
            for schedule, state in reversed(list(zip(one[:done], states, strict=True))):
                schedule.load_state_dict(state)
    times = {"seen": None}
    assert one[0].state_dict() | times == other[0].state_dict() | times


def test_squares_that_overflow_are_left_out():
    schedules = build()
    steps(schedules, (0.9, 0.8), WINDOW)
    step(schedules, (math.inf, math.inf))
    assert steps(schedules, (0.9, 0.8), WINDOW)[-1] == 20
    assert all(math.isfinite(one) for one in itertools.chain(*schedules[0]._search._averages))


def test_gradients_of_zeros_are_compressed():
    assert None not in steps(build(), (0.0, 0.0), 9 * WINDOW, norm=0.0)

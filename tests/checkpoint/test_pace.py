"""Regular saves cost at most the share of the time that was given."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from horovod_sparse.checkpoint.pace import Pace


class Clock:
    """Clock that is set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def simulate(every, steps, step=0.1, held=0.05, slower=0.02, during=20, seed=0):
    """Return the steps after which a save began, and the seconds that saves cost in fact and in all.

    While a save is in progress, for ``during`` steps, steps take ``slower`` seconds longer.
    """
    clock, generator, saves, cost, left = Clock(), random.Random(seed), [], 0.0, 0
    pace = Pace(every, clock)
    for number in range(1, steps + 1):
        clock.seconds += generator.uniform(0.98, 1.02) * step + (slower if left else 0)
        cost += slower if left else 0
        left = max(left - 1, 0)
        if pace.due(number, left > 0):
            clock.seconds += held
            cost += held
            pace.saved(held)
            saves.append(number)
            left = during
    return saves, cost, clock.seconds, pace


@pytest.mark.parametrize("share", [1.0, 5.0])
@pytest.mark.parametrize("slower", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("held", [0.01, 2.0])
def test_saves_cost_about_the_share_that_was_given(share, slower, held):
    saves, cost, seconds, pace = simulate(f"{share}%", 30_000, held=held, slower=slower)
    assert len(saves) > 3
    one = held + 20 * slower
    assert (cost - one) / seconds < 1.05 * share / 100  # the first one is not in its share
    without_pause = len(saves) * 22 > 30_000
    assert without_pause or (cost - one) / seconds > 0.5 * share / 100
    assert pace.overhead == pytest.approx(cost / seconds, rel=0.1, abs=len(saves) * 0.01 / seconds)


def test_saves_are_spread_evenly():
    saves, *_ = simulate("1%", 50_000)
    gaps = [later - earlier for earlier, later in pairwise(saves[1:])]
    assert max(gaps) < 1.6 * min(gaps)


def test_a_step_that_takes_long_once_does_not_count():
    clock = Clock()
    pace = Pace("1%", clock)
    for number in range(1, 25):
        clock.seconds += 100.0 if number == 15 else 0.1  # an evaluation while a save is in progress
        if pace.due(number, in_progress=10 < number < 20):
            pace.saved(0.01)
    assert pace.overhead * clock.seconds < 0.2


def test_numbers_of_steps_and_seconds():
    assert simulate(7, 30)[0] == [7, 14, 21, 28]
    saves, *_ = simulate("10s", 1000, slower=0.0, held=0.0)
    assert 8 <= len(saves) <= 10


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "0%", "100%", "1", "often", "-1%", "1 min", None])
def test_other_intervals_are_refused_by_name(every):
    with pytest.raises(ValueError, match=r"every=.* is no interval: pass steps") as caught:
        Pace(every)
    assert repr(every) in str(caught.value)

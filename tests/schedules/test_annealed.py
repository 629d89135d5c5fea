"""Annealed: the density is proportional to the learning rate, down to a floor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.schedules import Annealed


@settings(max_examples=100)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]), min_size=1, max_size=300),
    floor=st.sampled_from([0.05, 0.2, 1.0]),
    interval=st.integers(1, 30),
    break_at=st.integers(0, 300),
)
def test_the_density_follows_the_learning_rate(rates, floor, interval, break_at):
    """The density is updated at intervals, and continues after a restart."""

    def new():
        return made(Annealed, 10, 0.01, floor=floor, interval=interval)

    schedule, highest = new(), 0.0
    for number, rate in enumerate(rates):
        if number == break_at:
            state, schedule = schedule.state_dict(), new()
            schedule.load_state_dict(state)
        if number % interval == 0:
            highest = max(highest, rate)
            factor = max(floor, rate / highest) if highest else 1.0
        assert schedule.densities(Step(rate, number=number)) == (pytest.approx(0.01 * factor),)


def test_ranks_with_different_learning_rates_have_the_same_density():
    """A rank in hvd.join() has the rate of the step in which it joined."""
    sums = [np.array([1.0]), np.array([0.8])]
    context = BucketContext(10, LIKE, ranks=2, consensus=lambda _: sums.pop(0))
    schedule = made(Annealed, context, 0.01, interval=1)
    assert [schedule.densities(Step(rate, number=n))[0] for n, rate in enumerate((0.5, 0.1))] == [0.01, 0.008]


@pytest.mark.parametrize("state", [{"highest": -1.0, "factor": 1.0}, {"highest": 1.0, "factor": 0.1}])
def test_a_damaged_state_is_refused(state):
    schedule = made(Annealed, 10, 0.01)
    with pytest.raises(ValueError, match="must be a finite number"):
        schedule.load_state_dict(state)

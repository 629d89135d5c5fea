"""Accordion: the high density where gradients change, the low one in between."""

from __future__ import annotations

import pytest
from schedules.moments import moment

from horovod_sparse.schedules import Accordion

LOW, HIGH = 0.01, 0.2


def densities(norms, rates=None, mean=list, schedule=None):
    """One step an epoch, intervals of two epochs; the density of each epoch."""
    schedule = schedule or Accordion(LOW, high_density=HIGH, interval=2)
    rates = rates or [1.0] * len(norms)
    return [
        schedule.densities(moment(epoch, epoch, rate, norm, mean))[0]
        for epoch, (norm, rate) in enumerate(zip(norms, rates, strict=True))
    ]


def test_the_density_is_high_until_two_norms_can_be_compared_and_low_once_they_agree():
    assert densities([1.0, 1.0, 0.9, 0.9, 0.8, 0.8]) == [HIGH] * 4 + [LOW] * 2


@pytest.mark.parametrize(("norm", "expected"), [(0.45, HIGH), (0.55, LOW), (1.45, LOW), (1.55, HIGH)])
def test_a_change_of_the_norm_by_half_asks_for_the_high_density(norm, expected):
    assert densities([1.0, 1.0, norm, norm, norm])[4] == expected


def test_the_high_density_ends_when_the_norm_settles():
    assert densities([1, 1, 1, 1, 9, 9, 9, 9, 9])[4:] == [LOW, LOW, HIGH, HIGH, LOW]


def test_a_learning_rate_that_dropped_asks_for_the_high_density():
    rates = [1.0] * 4 + [0.1] * 4
    assert densities([1.0] * 8, rates)[4:] == [HIGH, HIGH, LOW, LOW]


def test_the_norm_is_averaged_over_the_interval_and_the_ranks():
    means = []

    def mean(numbers):
        means.append(numbers)
        return [4 * one for one in numbers]

    assert densities([1.0, 3.0, 2.0], mean=mean)
    assert means == [[5.0]]  # the mean square of this rank's steps


def test_a_restored_one_goes_on():
    norms = [1.0, 2.0, 0.5, 0.5, 3.0, 1.0, 1.0, 1.1]
    whole = densities(norms)
    schedule = Accordion(LOW, high_density=HIGH, interval=2)
    seen = []
    for epoch, norm in enumerate(norms):
        seen += [schedule.densities(moment(epoch, epoch, 1.0, norm))[0]]
        state, schedule = schedule.state_dict(), Accordion(LOW, high_density=HIGH, interval=2)
        schedule.load_state_dict(state)
    assert seen == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"high_density": 0.001}, r"high_density must be at least density \(0.01\) and at most 1, not 0.001"),
        ({"interval": 0}, "interval must be at least 1 epoch, not 0"),
        ({"change": 0}, "change must be above 0, not 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Accordion(LOW, **options)

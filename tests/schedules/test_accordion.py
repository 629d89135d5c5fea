"""Accordion: the high density where gradients change, the low one in between."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, made

from horovod_sparse.rules import Place, Step
from horovod_sparse.schedules import Accordion

LOW, HIGH = 0.01, 0.2


def built(where=2):
    return made(Accordion, where, LOW, high_density=HIGH, interval=2)


def density(schedule, epoch, norm, rate=1.0):
    gradients = [(0, np.array([0.6, 0.8], np.float64) * norm * 8)]
    return schedule.densities(Step(rate, 8.0, epoch, number=epoch, gradients=gradients))[0]


def densities(norms, rates=None, where=2):
    """One step an epoch, intervals of two epochs; the density of each epoch."""
    schedule, rates = built(where), rates or [1.0] * len(norms)
    return [density(schedule, epoch, *step) for epoch, step in enumerate(zip(norms, rates, strict=True))]


def test_the_density_is_high_until_two_norms_can_be_compared_and_low_once_they_agree():
    assert densities([1.0, 1.0, 0.9, 0.9, 0.8, 0.8]) == [HIGH] * 4 + [LOW] * 2


@pytest.mark.parametrize(("norm", "expected"), [(0.45, HIGH), (0.55, LOW), (1.45, LOW), (1.55, HIGH)])
def test_a_change_of_the_norm_by_half_asks_for_the_high_density(norm, expected):
    assert densities([1.0, 1.0, norm, norm, norm])[4] == expected


def test_the_high_density_ends_when_the_norm_settles():
    assert densities([1, 1, 1, 1, 9, 9, 9, 9, 9])[4:] == [LOW, LOW, HIGH, HIGH, LOW]


def test_a_learning_rate_that_dropped_asks_for_the_high_density():
    assert densities([1.0] * 8, [1.0] * 4 + [0.1] * 4)[4:] == [HIGH, HIGH, LOW, LOW]


def test_the_norm_is_averaged_over_the_interval_and_the_ranks():
    summed = []
    densities([1.0, 3.0, 2.0], where=Place(2, LIKE, ranks=4, consensus=lambda array: summed.append(array) or array))
    # The mean square of this rank's steps, and whether the learning rate fell here.
    assert np.concatenate(summed) == pytest.approx([5.0, 0.0])


def test_a_learning_rate_that_fell_on_another_rank_counts_here():
    """A rank that takes part in hvd.join() does not know it."""
    fell_there = Place(2, LIKE, ranks=2, consensus=lambda array: 2 * array + [0, 1])
    assert densities([1.0] * 8, where=fell_there)[4:] == [HIGH] * 4


def test_a_restored_one_goes_on():
    norms, schedule, seen = [1.0, 2.0, 0.5, 0.5, 3.0, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0], built(), []
    for epoch, norm in enumerate(norms):
        seen.append(density(schedule, epoch, norm))
        state, schedule = schedule.state_dict(), built()
        schedule.load_state_dict(state)
    assert seen == densities(norms)
    assert {LOW, HIGH} == set(seen)

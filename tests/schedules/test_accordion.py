"""Accordion: the high density while the summed gradient changes or the learning rate falls, else the low one."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, made

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.schedules import Accordion

LOW, HIGH = 0.01, 0.2
DIRECTION = np.array([0.6, 0.8])


def built(where=2, **options):
    return made(Accordion, where, LOW, **{"high_density": HIGH, "interval": 2, **options})


def density(schedule, epoch, gradient, rate=1.0, scale=8.0, **conditions):
    gradients = [(0, (np.asarray(gradient) * scale).astype(np.float32))]
    return schedule.densities(Step(rate, scale, epoch, gradients=gradients, **conditions))[0]


def densities(norms, rates=None, where=2, steps=3, **options):
    """The density of each epoch, in all steps of which the gradient is the same."""
    schedule, seen = built(where, **options), []
    for epoch, (norm, rate) in enumerate(zip(norms, rates or [1.0] * len(norms), strict=True)):
        here = {density(schedule, epoch, norm * DIRECTION, rate) for _ in range(steps)}
        assert len(here) == 1
        seen.append(here.pop())
    return seen


@pytest.mark.parametrize(
    ("norms", "rates", "interval", "expected"),
    [
        # Every other epoch counts, the first one included; it is compared at its end.
        ([1] * 6, None, 2, "HHHLLL"),
        ([1] * 24, None, 10, "H" * 11 + "L" * 13),
        # A change by half, in the next counted epoch.
        *(
            ([1.0, 9.0, norm, 9.0, 9.0], None, 2, "HHH" + 2 * expected)
            for norm, expected in ((0.49, "H"), (0.5, "H"), (0.51, "L"), (1.49, "L"), (1.51, "H"))
        ),
        ([1, 0, 1, 0, 9, 0, 9, 0], None, 2, "HHHLLHHL"),
        ([0, 0, 1, 0], None, 2, "HHHH"),  # grows from zero
        # A lower learning rate, until the next comparison.
        *(([1] * 11, [1] * 5 + [rate] * 6, 4, "HHHHHHHHHLL") for rate in (0.1, 0.99)),
        *(([1] * 14, [1] * 6 + [rate] * 8, 4, "HHHHHLHHHLLLLL") for rate in (0.1, 0.99)),
        ([1] * 6, [0.1 * epoch for epoch in range(6)], 2, "HHHLLL"),  # a higher one changes nothing
        ([1] * 20, [1 - 0.01 * epoch for epoch in range(20)], 2, "H" * 20),  # falls in every epoch, as a cosine
    ],
)
def test_the_density_is_high_if_the_norm_changes_or_the_rate_falls(norms, rates, interval, expected):
    found = densities(norms, rates, interval=interval)
    assert "".join({HIGH: "H", LOW: "L"}[density] for density in found) == expected


def test_noise_of_single_steps_does_not_hide_a_change_of_the_signal():
    """Steps' norms are all about 1, whereas the mean gradient's falls from 0.5 to 0.2, and stays."""
    schedule, seen = built(), []
    for epoch, signal in enumerate([0.5] * 4 + [0.2] * 4):
        for noise in (1, -1, -1, 1):
            here = density(schedule, epoch, signal * DIRECTION + noise * DIRECTION[::-1] * (-1, 1))
        seen.append(here)
    assert seen[3:] == [LOW, LOW, HIGH, HIGH, LOW]


def test_dense_steps_at_the_start_count():
    """Without them, the norm of the first epoch would be that of its end."""
    schedule, seen = built(dense_steps=2), []
    for epoch in range(4):
        for number in range(3):
            gradient = (1.0 if epoch or number == 2 else -0.5) * DIRECTION
            seen.append(density(schedule, epoch, gradient, number=3 * epoch + number))
    assert seen == [1.0, 1.0, *[HIGH] * 10]


@pytest.mark.parametrize("scales", [(1.0,), (8.0, 1024.0), (65536.0, 1.0, 0.25)])
def test_the_loss_scale_may_change_within_an_epoch(scales):
    schedule, seen = built(), []
    for number in range(18):
        scale = scales[number % len(scales)]
        seen.append(density(schedule, number // 3, (1.0 if number < 12 else 0.4) * DIRECTION, scale=scale))
    assert seen == [HIGH] * 9 + [LOW] * 6 + [HIGH] * 3
    assert schedule._norm == pytest.approx(0.4)


def test_parameters_held_for_an_epoch_are_not_in_its_sum():
    schedule = built(3)
    for epoch in (0, 1):
        schedule.densities(Step(epoch=epoch, gradients=[(2, np.ones(1, np.float32))]))
    assert schedule._norm == 1


# --- ranks ---


def ranks(number, told, working=None, size=2):
    """Return a context among ranks with the same numbers as this one; idle ranks contribute nothing."""

    def consensus(numbers):
        told.append(numbers)
        return numbers * (number if working is None else working)

    return BucketContext(size, LIKE, ranks=number, consensus=consensus)


def test_the_norm_is_the_root_mean_square_over_ranks_and_exchanged_once_an_epoch():
    told = []
    densities([1.0, 3.0, 2.0, 1.0], [1.0, 1.0, 0.5, 0.5], where=ranks(4, told))
    # Square of the norm of the epoch's mean gradient, if it counted, whether it did; the rate of the next epoch.
    assert np.array(told) == pytest.approx(np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0.5, 1], [4, 1, 0.5, 1]]))


def test_ranks_that_idle_change_neither_the_norm_nor_the_rate():
    told = []
    assert densities([1.0] * 6, where=ranks(3, told, working=2)) == [HIGH] * 3 + [LOW] * 3


def test_an_idle_rank_follows_the_others():
    """Here, the learning rate of two other ranks fell."""
    context = BucketContext(2, LIKE, ranks=3, consensus=lambda numbers: numbers + np.array([2.0, 2, 2 * rate, 2]))
    schedule, seen = built(context), []
    for epoch in range(8):
        rate = 1.0 if epoch < 5 else 0.1
        seen.append(density(schedule, epoch, [7.0, 7.0], rate=9.0, idle=True))
    assert seen == [HIGH] * 3 + [LOW] * 2 + [HIGH] * 2 + [LOW]
    assert schedule._norm == 1


# --- state ---


def test_a_restored_schedule_continues():
    generator, schedule, seen, expected, whole = np.random.default_rng(3), built(), [], [], built()
    for number in range(300):
        epoch, rate = number // 7, 1.0 if number < 150 else 0.5
        gradient = (1 + (epoch // 5) % 3) * DIRECTION + generator.standard_normal(2)
        scale = 2.0 ** (number // 40)
        expected.append(density(whole, epoch, gradient, rate, scale))
        seen.append(density(schedule, epoch, gradient, rate, scale))
        state, schedule = schedule.state_dict(), built()
        schedule.load_state_dict(state)
    assert seen == expected
    assert {LOW, HIGH} == set(seen)


def test_the_buffer_exists_only_in_epochs_that_count():
    schedule, sizes = built(50), []
    for epoch in range(4):
        schedule.densities(Step(epoch=epoch, gradients=[(0, np.ones(50, np.float32))]))
        sizes.append(schedule.state_dict()["sum"].size)
    assert sizes == [50, 0, 50, 0]

"""The examples' learning-rate schedules."""

from __future__ import annotations

import pytest
from schedule import SCHEDULES, learning_rate_factor


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_linearly_to_the_full_rate(schedule: str) -> None:
    factors = [learning_rate_factor(schedule, step, warmup=4, steps=100) for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]
    for all_or_nothing in (0, 10):
        assert learning_rate_factor(schedule, all_or_nothing, warmup=all_or_nothing, steps=10) == 1.0


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [1.0] * 5), ("step", [1.0, 0.1, 0.1, 0.01, 0.01])])
def test_steps_fall_after_a_half_and_three_quarters_and_constants_stay(schedule: str, expected: list[float]) -> None:
    factors = [learning_rate_factor(schedule, step, warmup=20, steps=100) for step in (59, 60, 79, 80, 99)]
    assert factors == expected


def test_cosine_falls_to_zero() -> None:
    factors = [learning_rate_factor("cosine", step, warmup=10, steps=110) for step in range(10, 111)]
    assert factors == sorted(factors, reverse=True)
    assert factors[50] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)


def test_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'linear'; known are: constant, step, cosine"):
        learning_rate_factor("linear", 0, 0, 10)

"""Constant, and the dense steps at the start of every schedule."""

from __future__ import annotations

import pytest
from rules import made

from horovod_sparse.rules import Step
from horovod_sparse.schedules import SCHEDULES, Constant


def test_every_step_has_the_density_configured():
    schedule = made(Constant, 10, 0.25)
    assert [schedule.densities(Step(number=number)) for number in range(5)] == [(0.25,)] * 5
    assert (schedule.weighs, schedule.choose([1.0], float), schedule.state_dict()) == (False, (0, ()), {})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dense_steps", [0, 3])
def test_every_schedule_begins_with_its_dense_steps(name, dense_steps):
    schedule = made(SCHEDULES[name], 10, 0.01, dense_steps=dense_steps)
    first = [schedule.densities(Step(number=number, epoch=0))[0] for number in range(6)]
    assert [density == 1 for density in first] == [number < dense_steps for number in range(6)]

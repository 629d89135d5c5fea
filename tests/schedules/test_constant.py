"""Constant: the density configured, always."""

from __future__ import annotations

import pytest
from schedules.moments import run

from horovod_sparse.schedules import Constant


def test_every_step_has_the_density_configured():
    schedule = Constant(0.25)
    assert run(schedule, 5) == [0.25] * 5
    assert not schedule.weighs


def test_there_is_no_state():
    assert Constant(0.1).state_dict() == {}
    with pytest.raises(ValueError, match="Constant has no state"):
        Constant(0.1).load_state_dict({"step": 1})

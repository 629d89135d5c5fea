"""States are refused where their structure or their numbers are impossible."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from horovod_sparse.rules.states import (
    checked_flag,
    checked_integer,
    checked_number,
    checked_numbers,
    require_finite,
    require_like,
    require_positions,
)


def test_an_array_of_other_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"state\['array'\] must be an array .*1 and float32, not 2 and float32"):
        require_like({"array": np.zeros((3, 1), np.float32)}, {"array": np.zeros(3, np.float32)})


@pytest.mark.parametrize("bad", [math.nan, -math.inf, np.float32("nan"), np.array([1, np.nan]), [0.0, math.inf]])
def test_nonfinite_numbers_are_refused_except_in_schedules(bad):
    with pytest.raises(ValueError, match=r"state\['a'\]\['b'\].* not finite"):
        require_finite({"a": {"b": bad}}, "state")
    require_finite({"schedule": {"norm": bad}, "none": None, "name": "nan", "bits": np.array([True])}, "state")


def test_values_are_checked():
    assert (checked_integer(np.int64(3), "k"), checked_number(2, "x"), checked_flag(np.True_, "f")) == (3, 2.0, True)
    assert math.isnan(checked_number(math.nan, "x"))
    assert checked_numbers((1, 2.0), "sums", 2) == [1, 2]
    for refused in (
        *((checked_integer, value, "k") for value in (-1, 1.0, True, None, "1", np.array(1))),
        *((checked_number, value, "x") for value in (-1, True, None, "1", 1j, Fraction(1), np.zeros(1))),
        *((checked_numbers, value, "sums", 2) for value in ([1], None, 1.0, "12", [1, -1])),
        *((checked_flag, value, "f") for value in (1, None, "yes")),
    ):
        check, value, *more = refused
        with pytest.raises(ValueError, match=f"^{more[0]}.* must be .*, not "):
            check(value, *more)
    with pytest.raises(ValueError, match="x must be a finite number of at least 0, not inf"):
        checked_number(math.inf, "x", finite=True)


def test_positions_must_ascend_within_the_bucket():
    for good in ([], [0], [0, 4], [1, 2, 3]):
        require_positions(np.array(good, np.int32), 5, "blocks")
    for bad in ([-1], [5], [0, 5], [1, 1], [2, 1], [3, 1, 4]):
        with pytest.raises(ValueError, match="blocks must be ascending positions from 0 to 4"):
            require_positions(np.array(bad, np.int32), 5, "blocks")

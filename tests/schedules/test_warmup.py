"""WarmUp: an exponential fall of the density, by epochs or by steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rules import made

from horovod_sparse.rules import Step
from horovod_sparse.schedules import WarmUp


def densities(schedule, steps):
    return [schedule.densities(Step(number=number))[0] for number in range(steps)]


@settings(max_examples=50)
@given(density=st.floats(1e-5, 1.0), warmup=st.integers(0, 20), length=st.integers(1, 7))
@example(4.0**-5, 4, 1)
def test_the_density_falls_by_equal_factors_to_the_configured_one(density, warmup, length):
    """Lin et al.: 75 %, 93.75 %, 98.4375 %, 99.6 % and then 99.9 % sparse, for a density of 1/1024 and 4 epochs."""
    found = densities(made(WarmUp, 10, density, warmup=warmup, steps_per_epoch=length), (warmup + 2) * length)
    assert found[warmup * length :] == [density] * (2 * length)
    epochs = [1.0, *found[::length]]
    assert all(
        after / before == pytest.approx(density ** (1 / (warmup + 1)))
        for before, after in itertools.pairwise(epochs[: warmup + 2])
    )
    assert found == [one for one in found[::length] for _ in range(length)]


def test_a_list_of_densities_replaces_the_formula():
    schedule = made(WarmUp, 10, 0.01, warmup_densities=[0.5, 0.1], steps_per_epoch=2)
    assert densities(schedule, 6) == [0.5, 0.5, 0.1, 0.1, 0.01, 0.01]

"""WarmUp: an exponential fall of the density, by epochs or by steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.moments import moment, run

from horovod_sparse.schedules import WarmUp


def test_the_published_warm_up_of_four_epochs():
    """Lin et al.: 75 %, 93.75 %, 98.4375 %, 99.6 % and then 99.9 % sparse, for a density of 1/1024."""
    schedule = WarmUp(4.0**-5, warmup=4)
    densities = [schedule.densities(moment(epoch=epoch))[0] for epoch in range(7)]
    assert densities == pytest.approx([4.0**-1, 4.0**-2, 4.0**-3, 4.0**-4, 4.0**-5, 4.0**-5, 4.0**-5])


@given(density=st.floats(1e-5, 1.0), warmup=st.integers(0, 20), length=st.integers(1, 7))
def test_the_density_falls_in_equal_factors_to_the_one_configured(density, warmup, length):
    schedule = WarmUp(density, warmup=warmup, steps_per_epoch=length)
    densities = run(schedule, (warmup + 2) * length)
    assert densities[warmup * length :] == [density] * (2 * length)
    epochs = [1.0, *densities[::length]]
    assert all(
        after / before == pytest.approx(density ** (1 / (warmup + 1)))
        for before, after in itertools.pairwise(epochs[: warmup + 2])
    )
    assert densities == [one for one in densities[::length] for _ in range(length)]


def test_a_list_of_densities_replaces_the_formula():
    schedule = WarmUp(0.01, warmup_densities=(0.5, 0.1), steps_per_epoch=2)
    assert run(schedule, 6) == [0.5, 0.5, 0.1, 0.1, 0.01, 0.01]


def test_an_epoch_nobody_told_is_an_error_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"call optimizer.set_epoch\(epoch\).*or give the compression steps_per_"):
        WarmUp(0.01).densities(moment())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": -1}, "warmup must be a number of epochs of at least 0, not -1"),
        ({"warmup_densities": (0.5, 1.5)}, r"warmup_densities must be in \(0, 1\], not 1.5"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, not 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WarmUp(0.01, **options)

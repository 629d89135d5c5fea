"""Cost of statistics: what is left out is left out, and the table's numbers are those of the differences."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere
from training import mlp, train, wrap

from benchmarks.statistics_cost import KINDS, bucket_seconds, measure, row, uncounted


@pytest.mark.mpi
def test_steps_inside_count_nothing_and_train_alike(comm, hvd):
    model, other = mlp(), mlp()
    optimizer, another = wrap(model), wrap(other)
    with uncounted():
        parameters = train(optimizer, model, comm.Get_rank(), range(2))
    assert everywhere(comm, optimizer.statistics() == {})
    expected = train(another, other, comm.Get_rank(), range(2))
    assert everywhere(comm, all(bool((one == two).all()) for one, two in zip(parameters, expected, strict=True)))


@pytest.mark.mpi
def test_every_kind_is_timed_in_every_round(comm, hvd):
    model = mlp()
    optimizer = wrap(model)
    steps = []
    seconds = measure(lambda: steps.append(train(optimizer, model, comm.Get_rank(), range(1))), optimizer, rounds=2)
    assert everywhere(comm, seconds.shape == (len(KINDS), 2) and seconds.min() > 0)
    assert everywhere(comm, len(steps) == 2 * len(KINDS))


@pytest.mark.mpi
def test_a_bucket_is_timed_with_and_without(comm):
    without, more = bucket_seconds("topka:density=0.01", blocks=4, steps=20)
    assert everywhere(comm, without.shape == more.shape == (4,) and without.min() > 0)


def test_a_row_has_the_median_difference():
    without = np.array([1e-3, 2e-3, 3e-3])
    assert row("counted", without + 1e-5, without).split() == ["counted", "2.01", "10.0", "+-", "0.0", "0.50%"]
    assert row("nothing counted", without, without).split()[-2:] == ["-", "-"]

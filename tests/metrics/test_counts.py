"""Sums over the steps of buckets, and the flat statistics."""

from __future__ import annotations

from collections import Counter

import pytest

from horovod_sparse.metrics.counts import Counts, is_sum, statistics


def counted(**more):
    counts = Counts(**more)
    counts.exchanged(1000, 10, 12, 30, "oktopk")
    counts.exchanged(1000, 20, 18, 40, "dense")
    return counts


def test_sums_of_buckets_add_up_and_ratios_are_of_the_sums():
    one = counted(bytes_sent=100, dense_bytes=1000.0, nanoseconds=Counter(select=10**9), events=Counter(own=2))
    other = Counts(bytes_sent=200, dense_bytes=500.0, nanoseconds=Counter(select=10**9, agree=5 * 10**8))
    other.exchanged(200, 200, 200, 200, "dense")
    numbers = statistics({0: one, 3: other})
    of_total = {key.removeprefix("total/"): value for key, value in numbers.items() if key.startswith("total/")}
    for name in filter(is_sum, set(of_total) - {"steps"}):
        assert of_total[name] == sum(numbers.get(f"bucket{bucket}/{name}", 0) for bucket in (0, 3))
    assert (numbers["total/steps"], numbers["bucket0/steps"], numbers["bucket3/steps"]) == (2, 2, 1)
    assert (numbers["total/steps_dense"], numbers["total/steps_oktopk"], numbers["total/own"]) == (2, 1, 2)
    assert (numbers["bucket0/density_asked"], numbers["bucket0/density"]) == (30 / 2000, 30 / 2000)
    assert numbers["total/density"] == 230 / 2200
    assert numbers["total/ratio_to_dense"] == 0.2
    assert (numbers["total/seconds_select"], numbers["total/seconds_agree"]) == (2.0, 0.5)


def test_all_statistics_are_plain_numbers():
    norms = {"gradient": 4.0, "accumulated": 16.0, "selected": 4.0, "held": 12.0}
    events = {"trial_exposed_share": 1, "trial_seconds_0.01": 1}
    numbers = statistics({0: counted(measured=1, **norms, dense_bytes=1.0, events=Counter(events))})
    assert {type(value) for value in numbers.values()} <= {int, float}
    names = {key.removeprefix("bucket0/") for key in numbers if key.startswith("bucket0/")}
    ratios = {"density_asked", "density", "ratio_to_dense", "gradient_norm", "residual_norm", "gain"}
    assert {name for name in names if not is_sum(name)} == {*ratios, "trial_exposed_share", "trial_seconds_0.01"}


def test_norms_are_reported_only_if_measured():
    taken = counted(measured=1, gradient=9.0, accumulated=16.0, selected=4.0, held=12.0)
    numbers = statistics(
        {0: taken, 1: Counts(measured=1, gradient=16.0, accumulated=16.0, selected=16.0, steps=1), 2: counted()}
    )
    assert (numbers["bucket0/gradient_norm"], numbers["bucket0/gain"]) == (3.0, 0.25)
    assert numbers["bucket0/residual_norm"] == pytest.approx(12**0.5)
    assert (numbers["total/gradient_norm"], numbers["total/gain"]) == (5.0, 20 / 32)
    assert "bucket2/gradient_norm" not in numbers


def test_buckets_without_a_step_are_left_out():
    assert statistics({}) == {}
    assert statistics({0: Counts()}) == {}

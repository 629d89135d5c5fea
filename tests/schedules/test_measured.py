"""Measured: the largest density that costs no time, on a simulated network and clock."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.schedules import Measured
from horovod_sparse.schedules.measured import _Trials

law = pytest.mark.law
DENSITIES = (1.0, 0.1, 0.03, 0.01, 0.002)


class Training:
    """One rank of a training whose steps take as long as computing, or as the bytes, with noise of each rank."""

    def __init__(self, transport, buckets=3, noise=0.0, seed=0):
        self.options, self.transport = Measured.Options(densities=DENSITIES), transport
        self.time, self.noise, self.events = 0.0, noise, Counter()
        self.generator = np.random.default_rng([seed, transport.rank])
        self.contexts = [
            BucketContext(10, LIKE, bucket, transport.rank, transport.size, transport.allreduce, events=self.events)
            for bucket in range(buckets)
        ]
        self.restart()

    def restart(self):
        self.trials = _Trials(self.options, clock=lambda: self.time)

    def train(self, steps, computing, dense):
        """Return the densities of some steps."""
        used = []
        for _ in range(steps):
            (density,) = {self.trials.begin(context) for context in self.contexts}
            self.time += max(computing, density * dense) * (1 + self.noise * self.generator.exponential())
            used.append(density)
        assert (self.transport.allgather_integers(hash(tuple(used)) % 2**31) == hash(tuple(used)) % 2**31).all()
        return used


@law
@settings(max_examples=40)
@given(
    buckets=st.integers(1, 3),
    dense=st.floats(0.01, 300.0),
    noise=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)
def test_the_largest_density_that_costs_no_time_is_found_within_a_hundred_steps(transport, buckets, dense, noise, seed):
    training = Training(transport, buckets, noise, seed)
    used = training.train(110, 1.0, dense)
    if noise:
        assert used[-1] * dense <= max(1.5, min(DENSITIES) * dense)
    else:
        assert used[-1] == max([density for density in DENSITIES if density * dense <= 1.05], default=min(DENSITIES))
    assert training.events["decisions"] == 1
    # Hopeless densities are tried once, and larger ones not at all.
    hopeless = [density for density in DENSITIES if density * dense > 2 * max(1.0, min(DENSITIES) * dense)]
    assert sum(used.count(density) for density in hopeless) <= 1 + training.options.trial


@law
def test_another_network_leads_to_other_densities_and_patience_grows(transport):
    training = Training(transport)
    assert training.train(400, 1.0, 0.5)[-1] == 1.0
    assert training.train(500, 1.0, 20.0)[-1] == 0.03
    assert training.train(900, 1.0, 0.5)[-1] == 0.03  # its steps are as long as before
    assert training.train(900, 0.5, 0.1)[-1] == 1.0
    assert training.events["decisions"] == 3
    for number in range(25):  # a network that changes all the time
        training.train(120, 1.0, (0.5, 20.0)[number % 2])
    assert training.events["decisions"] <= 3 + 2


@law
@pytest.mark.parametrize("at", [0, 5, 50, 107, 300])
def test_a_restored_schedule_goes_on_with_its_decisions(transport, at):
    training = Training(transport)
    training.train(at, 1.0, 20.0)
    state = training.trials.state_dict()
    training.restart()
    training.trials.load_state_dict(state)
    assert training.trials.state_dict() == state
    assert training.train(110, 1.0, 20.0)[-1] == 0.03


def test_trials_start_after_the_dense_steps():
    context = BucketContext(10, LIKE)
    schedule = made(Measured, context, 0.01, densities=(1.0, 0.1), dense_steps=3)
    found = [schedule.densities(Step(number=number))[0] for number in range(7)]
    assert found == [1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 9}, "does not fit 5"),
        ({"alive": [7]}, "does not fit 5"),
        ({"times": []}, "does not fit 5"),
        ({"reference": -1.0}, "must be a finite number"),
        ({"since": "x"}, "must be an integer"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    trials = _Trials(Measured.Options())
    with pytest.raises(ValueError, match=message):
        trials.load_state_dict({**trials.state_dict(), **change})


@pytest.mark.parametrize("densities", [(), (0.0,), (2.0, 0.1), "0.1", (True,)])
def test_densities_must_be_fractions(densities):
    with pytest.raises(ValueError, match=r"densities must be numbers in \(0, 1\]"):
        Measured.Options(densities=densities)

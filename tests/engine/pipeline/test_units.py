"""Residuals are kept in units of updates, so that a delayed gradient counts with its own learning rate."""

from __future__ import annotations

import laws
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, summed
from pipelines import continue_alike, own, residual, run
from rules import LIKE, eighths

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Momentum, snapshot

pytestmark = pytest.mark.law
SIZE, PEAK = 400, 0.05
SPECS = [f"{name},density=0.05" for name in ("topka:wire=float32", "oktopk:keep=4", "gtopk:wire=log8")]
# Learning rate relative to the peak, for the part in [0, 1) of a phase that has passed, and the number of the step.
PHASES = {
    "peak": lambda part, step: 1.0,
    "tenth": lambda part, step: 0.1,
    "zero": lambda part, step: 0.0,
    "tiny": lambda part, step: 1e-9,
    "rising": lambda part, step: part,
    "falling": lambda part, step: (1 + np.cos(np.pi * part)) / 2,
    "alternating": lambda part, step: (1.0, 0.01)[step % 2],
    "pausing": lambda part, step: float(step % 3 > 0),
}
SCHEDULES = st.lists(st.tuples(st.sampled_from([*PHASES]), st.integers(3, 60)), min_size=2, max_size=5)
RESTARTS = [("falling", 50)] * 3


def build(transport, spec, **settings):
    return pipeline_for(parse(spec), SIZE, LIKE, transport, factor=1 / transport.size, **settings)


def rates(schedule):
    """Return the learning rates of the steps of a schedule."""
    steps = [(kind, step / length) for kind, length in schedule for step in range(length)]
    return [PEAK * float(PHASES[kind](part, number)) for number, (kind, part) in enumerate(steps)]


def held(pipeline):
    """Return the residual of this rank as an update."""
    return pipeline.state_dict()["unit"] * residual(pipeline)


@pytest.mark.parametrize("spec", [*SPECS[:2], pytest.param(SPECS[2], marks=pytest.mark.full)])
@laws.examples(6)
@given(schedule=SCHEDULES)
def test_without_momentum_updates_are_conserved(transport, spec, schedule):
    """Sum of rate * delivered, and what is held, are the sum of rate * gradient."""
    pipeline, draw = build(transport, spec), own(transport)
    given_, delivered = np.zeros((2, SIZE))
    for rate in rates(schedule):
        gradient = eighths(draw, SIZE)
        given_ += rate * gradient / transport.size
        delivered += rate * run(pipeline, gradient, learning_rate=rate)
    total = delivered + summed(transport, held(pipeline))
    assert everywhere(transport, np.allclose(total, summed(transport, given_), rtol=1e-5, atol=1e-4 * PEAK))


class Descent:
    """Momentum SGD as torch's, on quadratic functions with noise that differ between ranks."""

    def __init__(self, momentum, ranks, seed):
        self._momentum, self._ranks, self._seed = momentum, ranks, seed
        draw = np.random.default_rng(seed)
        self.parameters, self._buffer = np.zeros((2, SIZE))
        self._target, self._curvature = draw.standard_normal(SIZE), draw.uniform(0.01, 0.03, SIZE)

    def gradients(self, number):
        noise = np.random.default_rng((self._seed, number)).standard_normal((self._ranks, SIZE))
        return (self._curvature * (self.parameters - self._target) + 0.01 * noise).astype(np.float32)

    def apply(self, gradient, rate, number):
        momentum = self._momentum
        share = momentum.share if number else momentum.first
        self._buffer = momentum.factor * self._buffer + share * gradient
        step = gradient + momentum.factor * self._buffer if momentum.nesterov else self._buffer
        self.parameters = self.parameters - rate * step


MOMENTA = {
    "heavy ball": Momentum(0.9),
    "Nesterov": Momentum(0.9, nesterov=True),
    "dampening": Momentum(0.9, share=0.5),
    "0.5": Momentum(0.5),
}


def norms(transport, spec, momentum, schedule, seed):
    """Return the largest norms of the parameters in sparse and in dense training."""
    pipeline, most = build(transport, spec), np.zeros(2)
    conditions = {"momentum": momentum} if "memory=momentum" in spec else {"momentum_after": True}
    sparse, dense = (Descent(momentum, transport.size, seed) for _ in range(2))
    for number, rate in enumerate(rates(schedule)):
        mine = sparse.gradients(number)[transport.rank]
        sparse.apply(run(pipeline, mine, learning_rate=rate, **conditions), rate, number)
        pipeline.commit()
        dense.apply(dense.gradients(number).mean(0), rate, number)
        most = np.maximum(most, [np.linalg.norm(one.parameters) for one in (sparse, dense)])
    return most


# Front ends turn Nesterov's form off for the memory that applies it.
GROWTH = [(spec, name) for spec in SPECS for name in MOMENTA] + [
    ("topka:memory=momentum,density=0.05", name) for name in MOMENTA if name != "Nesterov"
]


@pytest.mark.parametrize("spec", [*SPECS[:2], "topka:memory=momentum,density=0.05"])
def test_warm_restarts_with_momentum_end_where_those_of_dense_training_do(transport, spec):
    sparse, dense = norms(transport, spec, MOMENTA["heavy ball"], RESTARTS, seed=0)
    assert everywhere(transport, 0 < sparse <= 1.2 * dense)


@pytest.mark.parametrize(
    ("spec", "momentum"),
    [
        pytest.param(*case, marks=pytest.mark.nightly if number % 9 else pytest.mark.full)
        for number, case in enumerate(GROWTH)
    ],
)
@laws.examples(4)
@given(schedule=SCHEDULES, seed=st.integers(0, 9))
def test_with_momentum_the_parameters_grow_no_further_than_in_dense_training(transport, spec, momentum, schedule, seed):
    sparse, dense = norms(transport, spec, MOMENTA[momentum], [*schedule, *RESTARTS], seed)
    assert everywhere(transport, 0 < sparse <= 1.2 * dense)


def test_with_momentum_the_unit_is_the_mean_rate_of_what_is_held(transport):
    pipeline, draw, factor = build(transport, SPECS[0].replace("0.05", "0.25")), np.random.default_rng(3), 0.0
    mean, before = 0.0, np.zeros(SIZE)
    for number, rate in enumerate((1.0, 1.0, 0.25, 0.0, 0.5, 2.0)):
        scale = 4.0 ** (number % 2)
        gradient = eighths(draw, SIZE) * np.float32(scale)
        total = run(pipeline, gradient, learning_rate=rate, loss_scale=scale, momentum_after=True)
        factor = min(1.0, mean / rate) if number and rate else 1.0
        earlier = mean / factor if number else rate
        mean = earlier + 0.25 * (rate - earlier)
        assert everywhere(transport, np.isclose(pipeline.state_dict()["unit"], mean / scale / transport.size))
        after = summed(transport, residual(pipeline)) / scale
        expected = factor * before + summed(transport, gradient) / scale
        assert everywhere(transport, np.allclose(total * transport.size / scale + after, expected, rtol=1e-5))
        before = after
    assert everywhere(transport, mean == 2.0)  # a rate above the mean makes the residual worth as much per gradient


@pytest.mark.parametrize("after", [False, True])
def test_a_loaded_state_continues_with_the_same_bits_when_the_rate_rises_again(transport, after):
    one, other = (build(transport, SPECS[1]) for _ in range(2))
    draw = own(transport)
    for rate in (1.0, 1.0, 0.01, 0.0):
        run(one, eighths(draw, SIZE), learning_rate=rate, momentum_after=after)
    other.load_state_dict(snapshot(one.state_dict()))
    for rate in (0.0, 0.5, 2.0):
        continue_alike(transport, one, other, [eighths(draw, SIZE)], learning_rate=rate, momentum_after=after)


def test_states_with_different_mean_rates_are_merged(transport):
    """A rank that was in join() may have had another learning rate; its residual counts as gradients all the same."""
    old, new = (build(transport, SPECS[0]) for _ in range(2))
    for rate in (1.0, 1.0 + transport.rank):
        run(old, eighths(own(transport), SIZE), learning_rate=rate, momentum_after=True)
    states = transport.allgather_object(snapshot(old.state_dict()))
    new.load_state_dict(new.merge(states, states[0])[0])
    kept = summed(transport, old.state_dict()["memory"]["residual"])
    assert everywhere(transport, np.array_equal(residual(new), kept))
    assert everywhere(transport, new.state_dict()["unit"] == states[0]["unit"])


@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_a_step_with_a_rate_of_0_delivers_its_gradients_and_leaves_the_memory_unchanged(transport, memory):
    pipeline, draw = build(transport, f"{SPECS[0]},memory={memory}"), own(transport)
    conditions = {"momentum": Momentum(0.5)} if memory == "momentum" else {}
    for _ in range(3):
        run(pipeline, eighths(draw, SIZE), learning_rate=1.0, **conditions)
    before = snapshot(pipeline.state_dict())
    for rate in (0.0, 1e-9):
        assert everywhere(transport, run(pipeline, eighths(draw, SIZE), learning_rate=rate, **conditions).any())
        after = pipeline.state_dict()
        assert everywhere(transport, after["unit"] == before["unit"])
        for name, array in before["memory"].items():
            assert everywhere(transport, np.array_equal(after["memory"][name], array))


def test_the_loss_scale_may_change_in_a_step_with_a_rate_of_0(transport):
    """All results are multiples of those without a loss scale."""
    plain, scaled = (build(transport, f"{SPECS[0]},memory=momentum") for _ in range(2))
    draw = own(transport)
    for rate, scale in ((1.0, 1.0), (1.0, 2.0), (0.0, 8.0), (0.0, 4.0), (1.0, 4.0), (0.5, 4.0)):
        gradient, conditions = eighths(draw, SIZE), {"learning_rate": rate, "momentum": Momentum(0.5)}
        expected = run(plain, gradient.copy(), **conditions)
        total = run(scaled, gradient * np.float32(scale), loss_scale=scale, **conditions)
        assert everywhere(transport, np.array_equal(total, expected * np.float32(scale)))
        assert everywhere(transport, (scaled.sample is None) == (rate == 0)), "its unit would not be the memory's"
        plain.commit()
        scaled.commit()

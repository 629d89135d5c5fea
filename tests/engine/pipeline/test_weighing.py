"""GraVAC on several ranks: what is sent of what was weighed, one decision for a model, and its state."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from laws import digest, everywhere, same_bits, sum_bytes, summed, thorough
from rules import LIKE, eighths

from horovod_sparse import metrics
from horovod_sparse.config import Compression
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Step, snapshot, tally

pytestmark = pytest.mark.mpi

COMBINATIONS = [
    ("topk", "topka"),
    pytest.param("reusedtopk", "oktopk", marks=pytest.mark.full),
    ("randomk", "shared"),
    pytest.param("randomblock", "shared", marks=pytest.mark.full),
]
every_combination = pytest.mark.parametrize(("sparsifier", "collective"), COMBINATIONS)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every step takes as long as any other."""
    monkeypatch.setattr(tally, "time", SimpleNamespace(perf_counter=itertools.count().__next__))


@pytest.fixture
def chosen():
    """Reads what was chosen so far, in all buckets."""
    metrics.clear()
    metrics.enable()
    yield lambda: [span.details["chosen"] for span in metrics.spans() if span.name == "weigh"]
    metrics.enable(False)
    metrics.clear()


class Model:
    """Buckets of equal sizes, whose gradients follow each other in one array."""

    def __init__(self, transport, buckets, size, undoable=False, **settings):
        sparse = Compression.gravac(**{"window": 10, "cf_max": 80.0, **settings})
        shared = {}
        self.pipelines = [
            pipeline_for(sparse, size, LIKE, transport, number=number, undoable=undoable, shared=shared)
            for number in range(buckets)
        ]

    def run(self, gradient, **conditions):
        """The total."""
        outputs = []
        for pipeline, part in zip(self.pipelines, np.split(gradient, len(self.pipelines)), strict=True):
            outputs.append(np.full_like(part, np.nan))
            pipeline.run([(0, part.copy())], [(0, outputs[-1])], Step(**conditions))
        return np.concatenate(outputs)

    def residual(self):
        parts = [pipeline.state_dict()["memory"]["residual"] for pipeline in self.pipelines]
        return np.concatenate(parts).astype(np.float64)

    def states(self):
        return [snapshot(pipeline.state_dict()) for pipeline in self.pipelines]

    def load(self, states):
        for pipeline, state in zip(self.pipelines, states, strict=True):
            pipeline.load_state_dict(state)


def own(transport, *seed):
    return np.random.default_rng([*seed, transport.rank])


def signal(size, generator, share=0.5):
    """Noise of this rank and a direction that all have in common; sums are exact."""
    common = eighths(np.random.default_rng(9), size, 32)
    return eighths(generator, size, 32) + np.float32(share) * common


@pytest.mark.law
@every_combination
def test_nothing_is_lost_in_hundreds_of_steps_and_all_ranks_send_alike(transport, chosen, sparsifier, collective):
    """Whatever is chosen: the signal comes and goes, so that in the end all three are."""
    settings = {"sparsifier": sparsifier, "collective": collective, "cf_step": 1.25}
    model, generator, steps = Model(transport, 2, 200, **settings), own(transport, 1), 300 if thorough() else 60
    given, totals, bits = np.zeros(400), np.zeros(400), []
    for number in range(steps):
        gradient = signal(400, generator, share=2.0 * (number % 100 < 40)) * np.float32(2.0 ** (-(number // 100)))
        given += gradient
        total = model.run(gradient)
        totals += total
        bits.append(digest(total))
    assert everywhere(transport, transport.broadcast_object(bits) == bits)
    assert transport.broadcast_object(chosen()) == chosen()
    assert {0, 1} <= set(chosen())
    everything = totals + summed(transport, model.residual())
    assert everywhere(transport, np.array_equal(everything, summed(transport, given)))


@pytest.mark.law
@pytest.mark.parametrize("gain", ["gradient", pytest.param("accumulated", marks=pytest.mark.full)])
def test_two_buckets_decide_as_one_of_all_their_parameters(transport, chosen, gain):
    """The second bucket's gradients are those of the first one in another order, so that both send the same values."""
    two, one, generator = (
        *(Model(transport, buckets, 800 // buckets, gain=gain) for buckets in (2, 1)),
        own(transport, 2),
    )
    order, seen = np.random.default_rng(3).permutation(400), {1: [], 2: []}
    for number in range(200 if thorough() else 60):
        half = generator.standard_normal(400) + 0.3 * (number % 100 < 50) * np.arange(-200, 200) / 100
        gradient = np.concatenate([half, half[order]]).astype(np.float32)
        for buckets, model in ((2, two), (1, one)):
            metrics.clear()
            model.run(gradient)
            seen[buckets].append({*chosen()})
    assert seen[2] == seen[1]
    assert len({*map(frozenset, seen[1])}) > 1
    assert everywhere(transport, transport.broadcast_object(seen[1]) == seen[1])


@pytest.mark.slow
@every_combination
def test_a_restored_model_goes_on_with_the_same_bits(transport, sparsifier, collective):
    settings = {"sparsifier": sparsifier, "collective": collective, "cf_step": 1.25, "window": 5, "cf_max": 40.0}
    model, generator = Model(transport, 2, 200, **settings), own(transport, 4)
    other = Model(transport, 2, 200, **settings)
    for number in range(80):
        gradient = signal(400, generator)
        totals = [one.run(gradient) for one in (model, other)]
        assert everywhere(transport, np.array_equal(*totals))
        if number % 7 == 3:
            states, other = other.states(), Model(transport, 2, 200, **settings)
            other.load(states)


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, *(pytest.param(done, marks=pytest.mark.full) for done in (2, 3))])
def test_a_step_that_is_undone_in_some_buckets_leaves_no_trace(transport, done):
    model, other = (Model(transport, 3, 100, undoable=True) for _ in range(2))
    generator, bad = own(transport, 5), own(transport, 6)
    for number in range(40):
        gradient = signal(300, generator)
        assert everywhere(transport, np.array_equal(model.run(gradient), other.run(gradient)))
        if number % 3 == 0:
            begun = model.pipelines[:done]
            for pipeline in begun:
                wrong = 1e3 * signal(100, bad)
                pipeline.run([(0, wrong)], [(0, wrong)], Step())
            for pipeline in reversed(begun):
                pipeline.undo()
    assert everywhere(transport, np.array_equal(model.residual(), other.residual()))


def test_buckets_that_are_not_finite_are_left_out_and_the_ranks_go_on_alike(transport, chosen):
    model, generator = Model(transport, 3, 100), own(transport, 7)
    bad = np.random.default_rng(8)
    for _ in range(60):
        gradient = signal(300, generator)
        for bucket in np.flatnonzero(bad.random(3) < 0.3):
            if bad.integers(transport.size) == transport.rank:
                gradient[100 * bucket] = np.nan
        assert same_bits(transport, model.run(gradient))
    assert transport.broadcast_object(chosen()) == chosen()
    gains = model.pipelines[0].schedule._search.gains
    assert everywhere(transport, bool(np.isfinite(gains).all()))


def test_ranks_that_idle_leave_the_decisions_to_the_others(transport, chosen):
    """All but rank 0 stop half-way; gains stay what they were, and all ranks know them."""
    model, generator, size = Model(transport, 2, 200, window=20, cf_max=1e6), own(transport, 9), transport.size
    gains = []
    for number in range(120):
        idle = number >= 60 and transport.rank > 0
        gradient = signal(400, generator) * np.float32(not idle)
        if idle:
            for pipeline in model.pipelines:
                pipeline.run([], [], Step(idle=True))
        else:
            model.run(gradient)
        gains.append(model.pipelines[0].schedule._search.gains)
    assert transport.broadcast_object(chosen()) == chosen()
    assert everywhere(transport, transport.broadcast_object(gains) == gains)
    assert size == 1 or gains[-1][0] > 0.7 * gains[59][0]


def test_a_state_goes_over_to_another_number_of_ranks(transport):
    """The decision in force, averages and candidates are those of the old rank 0."""
    old, new = Model(transport, 2, 200), Model(transport, 2, 200)
    for number in range(35):
        old.run(signal(400, own(transport, 10, number)))
    states = transport.broadcast_object(old.states())
    for pipeline, state in zip(new.pipelines, states, strict=True):
        merged, _ = pipeline.merge([], state)
        pipeline.load_state_dict(merged)
    searches = [model.pipelines[0].schedule._search for model in (old, new)]
    assert everywhere(transport, searches[0].gains == searches[1].gains)
    assert everywhere(transport, searches[0].candidate == searches[1].candidate > 20)
    assert same_bits(transport, new.run(signal(400, own(transport, 11))))


def test_random_positions_are_narrowed_without_indices(transport, chosen):
    """Only values travel, with factors from 1.5 on, as in the published comparison with Accordion."""
    settings = {"cf_min": 1.5, "cf_max": 6.0, "sparsifier": "randomk", "collective": "shared", "eps": 0.4}
    model, generator = Model(transport, 1, 600, **settings), own(transport, 12)
    traffic, sent = model.pipelines[0].traffic, []
    for _ in range(25):
        before = traffic.bytes_sent
        model.run(signal(600, generator))
        sent.append(traffic.bytes_sent - before)
    values = {0: 400, 1: 200, None: 600}
    expected = [sum_bytes(transport, 4 * values[one]) for one in chosen()[:20]]
    assert everywhere(transport, np.allclose(sent[:20], expected, rtol=0, atol=8))
    assert 1 in chosen()[:20]

"""GraVAC on several ranks: one decision for a model, the entries that are sent, and the state."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from laws import digest, everywhere, same_bits, sum_bytes, summed, thorough
from pipelines import own, residual, run
from rules import LIKE, eighths

from horovod_sparse import metrics
from horovod_sparse.config import Compression
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import snapshot, tally

pytestmark = pytest.mark.mpi

COMBINATIONS = [
    ("topk", "topka"),
    pytest.param("reusedtopk", "oktopk", marks=pytest.mark.full),
    ("randomk", "shared"),
    pytest.param("randomblock", "shared", marks=pytest.mark.full),
]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Make all steps take equally long."""
    monkeypatch.setattr(tally, "time", SimpleNamespace(perf_counter=itertools.count().__next__))


@pytest.fixture
def chosen():
    """Return the choices so far in all buckets."""
    metrics.clear()
    metrics.enable()
    yield lambda: [span.details["chosen"] for span in metrics.spans() if span.name == "weigh"]
    metrics.enable(False)
    metrics.clear()


class Model:
    """Buckets of equal sizes, whose gradients follow each other in one array."""

    def __init__(self, transport, buckets, size, **settings):
        sparse = Compression.gravac(**{"window": 10, "cf_max": 80.0, **settings})
        shared = {}
        self.pipelines = [
            pipeline_for(sparse, size, LIKE, transport, number=number, shared=shared) for number in range(buckets)
        ]

    def run(self, gradient):
        """Run one step; return the total."""
        parts = np.split(gradient, len(self.pipelines))
        return np.concatenate([run(one, part.copy()) for one, part in zip(self.pipelines, parts, strict=True)])


def signal(size, generator, share=0.5):
    """Return noise of this rank plus a common direction; sums are exact."""
    common = eighths(np.random.default_rng(9), size, 32)
    return eighths(generator, size, 32) + np.float32(share) * common


@pytest.mark.law
@pytest.mark.parametrize(("sparsifier", "collective"), COMBINATIONS)
def test_nothing_is_lost_in_hundreds_of_steps_and_ranks_decide_alike(transport, chosen, sparsifier, collective):
    """The signal comes and goes, so that all three choices occur."""
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
    held = np.concatenate([residual(one) for one in model.pipelines])
    assert everywhere(transport, np.array_equal(totals + summed(transport, held), summed(transport, given)))


def test_nonfinite_buckets_are_left_out_of_the_decision(transport, chosen):
    model, generator = Model(transport, 3, 100), own(transport, 7)
    bad = np.random.default_rng(8)
    for _ in range(60):
        gradient = signal(300, generator)
        for bucket in np.flatnonzero(bad.random(3) < 0.3):
            if bad.integers(transport.size) == transport.rank:
                gradient[100 * bucket] = np.nan
        assert same_bits(transport, model.run(gradient))
    assert transport.broadcast_object(chosen()) == chosen()
    gains = model.pipelines[0].rules.schedule._search.gains
    assert everywhere(transport, bool(np.isfinite(gains).all()))


def test_a_state_loads_with_another_world_size(transport):
    """Decision, averages and candidates are those of the old rank 0."""
    old, new = Model(transport, 2, 200), Model(transport, 2, 200)
    for number in range(35):
        old.run(signal(400, own(transport, 10, number)))
    states = transport.broadcast_object([snapshot(pipeline.state_dict()) for pipeline in old.pipelines])
    for pipeline, state in zip(new.pipelines, states, strict=True):
        merged, _ = pipeline.merge([], state)
        pipeline.load_state_dict(merged)
    searches = [model.pipelines[0].rules.schedule._search for model in (old, new)]
    assert everywhere(transport, searches[0].gains == searches[1].gains)
    assert everywhere(transport, searches[0].candidate == searches[1].candidate > 20)
    assert same_bits(transport, new.run(signal(400, own(transport, 11))))


def test_random_positions_are_narrowed_without_indices(transport, chosen):
    """Only values travel, with factors from 1.5 on, as in the published comparison with Accordion."""
    settings = {"cf_min": 1.5, "cf_max": 6.0, "sparsifier": "randomk", "collective": "shared", "eps": 0.4}
    model, generator = Model(transport, 1, 600, **settings), own(transport, 12)
    traffic, sent = model.pipelines[0].rules.collective.traffic, []
    for _ in range(25):
        before = traffic.bytes_sent
        model.run(signal(600, generator))
        sent.append(traffic.bytes_sent - before)
    values = {0: 400, 1: 200, None: 600}
    expected = [sum_bytes(transport, 4 * values[one]) for one in chosen()[:20]]
    assert everywhere(transport, np.allclose(sent[:20], expected, rtol=0, atol=8))
    assert 1 in chosen()[:20]

"""A limit on what one step delivers: kept to, and nothing lost by it."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, same_bits, summed
from pipelines import continue_alike, own, residual, run
from rules import LIKE, eighths

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Momentum, snapshot

pytestmark = pytest.mark.law

SIZE, LIMIT = 1200, 1.5
FILLING = 20  # steps without a limit, in which velocities grow
SPEC = f"density=0.05,memory=momentum,momentum=0.5,fresh=0.4,limit={LIMIT}"
SPECS = [f"topka:{SPEC}", f"oktopk:keep=2,tau_threshold=4,tau_partition=4,wire=log4,{SPEC}", f"gtopk:{SPEC}"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_delivers_at_most_a_multiple_of_the_mean_and_nothing_is_lost(transport, spec):
    pipeline, draw = pipeline_for(parse(spec), SIZE, LIKE, transport), own(transport)
    given, delivered, mean, limited = np.zeros(SIZE), np.zeros(SIZE), 0.0, 0
    for number in range(400):
        gradient = eighths(draw, SIZE, 64) * np.float32(100.0 if number in (40, 41, 90) else number < 200)
        given += gradient
        total = run(pipeline, gradient).astype(np.float64)
        norm = np.linalg.norm(total)
        mean = mean or norm
        assert everywhere(transport, number < FILLING or norm <= LIMIT * mean * (1 + 1e-5))
        limited += norm > LIMIT * mean * (1 - 1e-5)
        mean += (norm - mean) / 10
        delivered += total
        assert same_bits(transport, total)
    state = pipeline.state_dict()["memory"]
    # Over time, a gradient becomes 1 / (1 - m) of itself; u still delivers (1 - f) m / (1 - m) of what it holds.
    left = residual(pipeline) + 0.6 * state["velocity"].astype(np.float64)
    assert everywhere(transport, limited > 5)
    expected = summed(transport, given) / (1 - 0.5)
    assert everywhere(transport, np.allclose(delivered + summed(transport, left), expected, atol=0.05))


def test_a_change_of_the_loss_scale_is_no_change_of_the_norm(transport):
    totals = []
    for scales in ((1, 1), (1, 1024)):
        pipeline = pipeline_for(parse(SPECS[0]), SIZE, LIKE, transport)
        draw = own(transport)
        steps = [scales[number >= 20] for number in range(40)]
        totals.append([run(pipeline, eighths(draw, SIZE, 64) * scale, loss_scale=scale) / scale for scale in steps])
    assert everywhere(transport, np.array_equal(*totals))


def test_the_mean_is_part_of_the_state(transport):
    one, other = (pipeline_for(parse(SPECS[0]), SIZE, LIKE, transport) for _ in range(2))
    draw = own(transport)
    for _ in range(FILLING):
        run(one, eighths(draw, SIZE, 64))
    other.load_state_dict(snapshot(one.state_dict()))
    continue_alike(transport, one, other, [eighths(draw, SIZE, 64) * np.float32(100)])


def test_dense_steps_have_no_limit(transport):
    pipeline = pipeline_for(parse(f"topka:{SPEC.replace('0.05', '1.0', 1)}"), SIZE, LIKE, transport)
    for factor in (1, 100):
        total = run(pipeline, np.full(SIZE, factor, np.float32), momentum=Momentum())
    assert everywhere(transport, total.min() >= 100 * transport.size)

"""Rounded values with error feedback: at most half the bytes, and nothing lost over time."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, on_nodes, same_bits, summed
from pipelines import own, residual, run
from rules import LIKE

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Momentum

pytestmark = pytest.mark.law
SIZE = 2_600  # ten blocks of signs and a shorter one


def train(transport, spec, steps):
    """Run some steps; return the pipeline, and the sum of all ranks' gradients minus what was delivered."""
    pipeline = pipeline_for(parse(spec), SIZE, LIKE, transport)
    owed, generator = np.zeros(SIZE), own(transport)
    for _ in range(steps):
        gradient = generator.standard_normal(SIZE).astype(np.float32)
        output = run(pipeline, gradient)
        assert same_bits(transport, output)
        owed += summed(transport, gradient) - output
    return pipeline, owed


@pytest.mark.parametrize("wire", ["log4", "fitted3", "fitted2"])
@pytest.mark.parametrize("collective", ["topka", "oktopk"])
def test_rounding_errors_of_a_selection_are_delivered_later(transport, collective, wire):
    pipeline, owed = train(transport, f"{collective}:density=0.1,wire={wire}", 80)
    held = residual(pipeline)
    assert everywhere(transport, np.allclose(summed(transport, held), owed, atol=1e-2))
    assert everywhere(transport, np.abs(held).max() < 60)


@pytest.mark.parametrize(
    ("wire", "bits"),
    [("bfloat16", 16), ("float16", 16), ("log8", 8), ("log4", 4), ("fitted3", 3), ("fitted2", 2), ("sign", 1.125)],
)
@pytest.mark.parametrize("node_ranks", [None, 2])
def test_rounding_errors_of_dense_steps_are_delivered_later(transport, wire, bits, node_ranks):
    if node_ranks:
        transport = on_nodes(transport, node_ranks)
    steps = 100
    pipeline, owed = train(transport, f"dense:wire={wire}", steps)
    held = residual(pipeline)
    assert everywhere(transport, np.allclose(summed(transport, held), owed, atol=1e-2))
    assert everywhere(transport, np.abs(held).max() < (30 if wire in ("sign", "fitted2") else 10))
    if transport.nodes_for_sums():
        return  # a node's own sums are gathered in full precision
    ranks = transport.size
    ideal = 2 * SIZE * bits / 8 * (ranks - 1) / ranks
    around = 32 + (4 << int(bits) - 1 if wire.startswith("fitted") else 0)  # a message's header, and its levels
    assert everywhere(transport, ideal <= pipeline.traffic.bytes_sent / steps <= 1.05 * ideal + 2 * around * ranks)


@pytest.mark.parametrize("wire", ["bfloat16", "log8", "sign"])
def test_dense_steps_at_the_start_are_exact(transport, wire):
    pipeline = pipeline_for(parse(f"dense:wire={wire},dense_steps=2"), SIZE, LIKE, transport)
    generator = own(transport)
    for number in range(4):
        gradient = (generator.integers(-800, 800, SIZE) / 8).astype(np.float32)
        output = run(pipeline, gradient)
        exact = np.array_equal(output, summed(transport, gradient))
        assert everywhere(transport, exact == (number < 2))
        assert everywhere(transport, pipeline.state_dict()["memory"]["residual"].any() == (not exact))
    assert pipeline.statistics(norms=False).events == {"steps_dense": 2, f"steps_dense_{wire}": 2}


def test_signs_of_the_momentum_deliver_as_much_as_momentum(transport):
    """The optimizer's buffer holds what was delivered, and what the dense steps at the start left in it."""
    size, steps, warm = 520, 300, 30
    pipeline = pipeline_for(parse(f"onebit:memory=momentum,dense_steps={warm}"), size, LIKE, transport)
    generator, left, norms = own(transport), np.zeros(size), []
    buffer, exact, velocity, moved, plainly = (np.zeros(size) for _ in range(5))
    for number in range(steps):
        gradient = (1 + generator.standard_normal(size) * np.geomspace(0.5, 2, size)).astype(np.float32)
        output = run(pipeline, gradient, momentum=Momentum(0.9))
        pipeline.commit()  # the optimizer's step
        assert same_bits(transport, output)
        buffer, exact = 0.9 * buffer + output, 0.9 * exact + summed(transport, gradient.astype(np.float64))
        moved, plainly = moved + buffer, plainly + exact
        assert everywhere(transport, pipeline.handover.mode.plain == (number < warm))
        if number < warm:
            left = buffer
            continue
        left, velocity = 0.9 * left, 0.9 * velocity + gradient
        state = pipeline.state_dict()
        assert everywhere(transport, np.allclose(buffer - left, state["handover"]["values"], atol=1e-2))
        assert len(np.unique(np.abs(state["handover"]["values"]))) == -(-size // 256)
        norms.append(np.linalg.norm(state["memory"]["residual"]))
    assert everywhere(transport, np.allclose(pipeline.velocity, velocity, rtol=1e-3, atol=1e-3))
    held = summed(transport, pipeline.state_dict()["memory"]["residual"].astype(np.float64))
    assert everywhere(transport, np.allclose(plainly - moved, held, atol=0.1)), np.abs(plainly - moved - held).max()
    assert everywhere(transport, max(norms[-70:]) < 1.5 * max(norms[60:130]))  # it does not grow


def test_rounding_within_a_node_works_with_masked_momentum(transport):
    spec = "hierarchical:density=0.1,inner=dense,outer=dense,node_ranks=2,memory=momentum,masking=True,momentum=0.5"
    pipeline = pipeline_for(parse(f"{spec},wire=bfloat16"), SIZE, LIKE, transport)
    generator = own(transport)
    for _ in range(20):
        gradient = generator.standard_normal(SIZE).astype(np.float32)
        output = run(pipeline, gradient)
        assert same_bits(transport, output)
        assert everywhere(transport, np.isfinite(output).all() and output.any())

"""Exchanges in few bits, with error feedback: half of the bytes or fewer, and nothing lost over time."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, on_nodes, same_bits, summed
from rules import LIKE

from horovod_sparse.config import Compression, parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Step

pytestmark = pytest.mark.law
SIZE = 10_000


def run(transport, spec, steps):
    """Return the pipeline, and what is left of the gradients of all ranks after what was delivered."""
    pipeline = pipeline_for(parse(spec), SIZE, LIKE, transport)
    owed, generator = np.zeros(SIZE), np.random.default_rng(transport.rank)
    for _ in range(steps):
        gradient = generator.standard_normal(SIZE).astype(np.float32)
        output = np.empty_like(gradient)
        pipeline.run([(0, gradient)], [(0, output)], Step())
        assert same_bits(transport, output)
        owed += summed(transport, gradient) - output
    return pipeline, owed


@pytest.mark.parametrize("wire", ["log4", "fitted3", "fitted2"])
@pytest.mark.parametrize("collective", ["topka", "oktopk"])
def test_what_a_selection_loses_in_few_bits_is_delivered_later(transport, collective, wire):
    pipeline, owed = run(transport, f"{collective}:density=0.1,wire={wire}", 150)
    held = pipeline.state_dict()["memory"]["residual"]
    assert everywhere(transport, np.allclose(summed(transport, held), owed, atol=1e-2))
    assert everywhere(transport, np.abs(held).max() < 60)


@pytest.mark.parametrize(
    ("wire", "bits"),
    [("bfloat16", 16), ("float16", 16), ("log8", 8), ("log4", 4), ("fitted3", 3), ("fitted2", 2), ("sign", 1.125)],
)
@pytest.mark.parametrize("node_ranks", [None, 2])
def test_what_rounding_takes_is_delivered_later(transport, wire, bits, node_ranks):
    if node_ranks:
        transport = on_nodes(transport, node_ranks)
    steps = 300
    pipeline, owed = run(transport, f"dense:wire={wire}", steps)
    held = pipeline.state_dict()["memory"]["residual"]
    assert everywhere(transport, np.allclose(summed(transport, held), owed, atol=1e-2))
    assert everywhere(transport, np.abs(held).max() < (30 if wire in ("sign", "fitted2") else 10))
    if transport.nodes_for_sums():
        return  # a node's own sums are gathered in full precision
    ranks = transport.size
    ideal = 2 * SIZE * bits / 8 * (ranks - 1) / ranks
    assert everywhere(transport, ideal <= pipeline.traffic.bytes_sent / steps <= 1.05 * ideal + 64 * ranks)


def test_a_node_may_sum_in_few_bits_before_momentum_is_masked(transport):
    spec = "hierarchical:density=0.1,inner=dense,outer=dense,node_ranks=2,memory=momentum,masking=True,momentum=0.5"
    pipeline = pipeline_for(parse(f"{spec},wire=bfloat16"), SIZE, LIKE, transport)
    generator = np.random.default_rng(transport.rank)
    for _ in range(20):
        gradient = generator.standard_normal(SIZE).astype(np.float32)
        output = np.empty_like(gradient)
        pipeline.run([(0, gradient)], [(0, output)], Step())
        assert same_bits(transport, output)
        assert everywhere(transport, np.isfinite(output).all() and output.any())


def test_without_a_format_nothing_is_rounded_or_remembered():
    assert Compression.dense().is_dense
    assert not Compression.dense(wire="bfloat16").is_dense
    assert parse("dense:wire=bfloat16") == Compression.dense(wire="bfloat16")

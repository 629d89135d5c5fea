"""The whole step of one bucket with every memory: what each keeps of the law, and that restarts and formats keep it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples, same_bits
from test_pipeline import build, eighths, remembered, step

from horovod_sparse.memories import MEMORIES

pytestmark = pytest.mark.mpi

# Collectives that return nothing, something and a lot.
COMMON = [("topk", "topka"), ("topk", "gtopk"), ("reusedtopk", "oktopk"), ("randomblock", "shared")]


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize(("sparsifier", "collective"), COMMON)
@examples(4)
@given(size=st.integers(1, 3000), density=st.sampled_from([0.01, 0.3, 1.0]), seed=st.integers(0, 2**31))
def test_momentum_is_lost_only_where_something_was_delivered(comm, sparsifier, collective, wire, size, density, seed):
    """The residuals take up the velocities: total + sum of v' = sum of (v + m u + g)."""
    options = {"momentum": 0.5, **({} if wire is None else {"wire": wire})}
    pipeline = build(
        comm, size, density, sparsifier=sparsifier, memory="momentum", collective=collective, options=options
    )
    generator = np.random.default_rng([seed, comm.Get_rank()])
    for _ in range(4):
        gradient = eighths(generator, size)
        velocity = 0.5 * pipeline.state_dict()["memory"]["velocity"] + gradient
        before = comm.allreduce(remembered(pipeline) + velocity)
        total = step(pipeline, gradient).astype(np.float64)
        assert everywhere(comm, np.array_equal(total + comm.allreduce(remembered(pipeline)), before))
        kept = pipeline.state_dict()["memory"]["velocity"]
        assert everywhere(comm, np.all((kept == velocity) | (kept == 0)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"saving": 0.6}, {"compressor": "quantize", "bits": 4}], ids=str)
@pytest.mark.parametrize("memory", ["conef", "improved"])
@pytest.mark.parametrize(("sparsifier", "collective"), [("topk", "gtopk"), ("randomblock", "shared")])
def test_a_contractive_memory_loses_nothing_in_expectation(comm, sparsifier, collective, memory, options):
    """Over many seeds: the total, and what the ranks' memories feed back next, are the sum of the gradients."""
    size, errors = 64, []
    gradient = np.random.default_rng([7, comm.Get_rank()]).standard_normal(size).astype(np.float32)
    everything = comm.allreduce(gradient.astype(np.float64))
    names = {"sparsifier": sparsifier, "memory": memory, "collective": collective}
    for seed in range(120):
        pipeline = build(comm, size, 0.1, **names, options={**options, "seed": seed})
        total = step(pipeline, gradient.copy()).astype(np.float64)
        accumulator = pipeline.memory.open([(0, np.zeros(size, np.float32))], 1.0)
        errors.append(total + comm.allreduce(accumulator.settle().astype(np.float64)) - everything)
    noise = np.std(errors, 0, ddof=1).max() / np.sqrt(len(errors))
    assert everywhere(comm, np.abs(np.mean(errors, 0)).max() <= 5 * noise)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(("sparsifier", "collective"), COMMON)
def test_every_combination_has_the_same_bits_everywhere_and_goes_on_after_a_restart(
    comm, sparsifier, collective, memory, wire
):
    names = {"sparsifier": sparsifier, "memory": memory, "collective": collective}
    first, second = (build(comm, 500, 0.05, **names, options={} if wire is None else {"wire": wire}) for _ in range(2))
    generator = np.random.default_rng(comm.Get_rank())
    for _ in range(3):
        assert same_bits(comm, step(first, generator.standard_normal(500).astype(np.float32), learning_rate=0.3))
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        gradient = generator.standard_normal(500).astype(np.float32)
        totals = [step(pipeline, gradient.copy(), learning_rate=0.2) for pipeline in (first, second)]
        assert everywhere(comm, np.array_equal(*totals))

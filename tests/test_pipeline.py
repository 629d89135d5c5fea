"""The whole step of one bucket obeys the law, for every combination of its parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples, same_bits, thorough

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.compression import Sparse
from horovod_sparse.pipeline import Pipeline
from horovod_sparse.sparsifiers import SPARSIFIERS
from horovod_sparse.step import Step

pytestmark = [pytest.mark.mpi, pytest.mark.law]

LIKE = np.zeros(0, np.float32)
SHARING = ["randomblock", "randomk", "stable"]
# Where a bucket of any size does not do with the defaults.
OPTIONS = {"threshold": {"threshold": 16.0}, "stable": {"block": 1, "refresh": 2}}
COMBINATIONS = [
    (sparsifier, collective)
    for sparsifier, collective in itertools.product(SPARSIFIERS, COLLECTIVES)
    if collective != "shared" or sparsifier in SHARING
    # Elsewhere, every collective and every sparsifier once.
    if thorough() or sparsifier == "topk" or collective == ("shared" if sparsifier in SHARING else "topka")
]


def eighths(generator, size):
    """Gradients whose sums are exact in float32."""
    return (generator.integers(-256, 256, size) / 8).astype(np.float32)


def remembered(pipeline):
    return pipeline.state_dict()["memory"]["residual"].astype(np.float64)


def build(comm, size, density=0.1, **names):
    return Pipeline(Sparse(density, **names), size, LIKE, comm)


def step(pipeline, gradient, **conditions):
    """One exchange of a bucket of one parameter; gives what the optimizer would see."""
    output = np.full_like(gradient, np.nan)
    pipeline.run([(0, gradient)], [(0, output)], Step(**conditions))
    return output


@pytest.mark.parametrize(("sparsifier", "collective"), COMBINATIONS)
@examples(6)
@given(size=st.integers(1, 3000), density=st.sampled_from([1e-4, 0.01, 0.3, 1.0]), seed=st.integers(0, 2**31))
def test_a_step_loses_nothing(comm, sparsifier, collective, size, density, seed):
    options = OPTIONS.get(sparsifier, {})
    pipeline = build(comm, size, density, sparsifier=sparsifier, collective=collective, options=options)
    generator = np.random.default_rng([seed, comm.Get_rank()])
    for _ in range(4):
        gradient = eighths(generator, size)
        before = comm.allreduce(remembered(pipeline) + gradient)
        total = step(pipeline, gradient).astype(np.float64)
        after = comm.allreduce(remembered(pipeline))
        assert everywhere(comm, np.array_equal(total + after, before))
        assert same_bits(comm, total)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_density_one_is_a_dense_allreduce(comm, collective):
    sparsifier = "randomblock" if collective == "shared" else "topk"
    pipeline = build(comm, 500, density=1.0, collective=collective, sparsifier=sparsifier)
    gradient = eighths(np.random.default_rng(comm.Get_rank()), 500)
    total = step(pipeline, gradient)
    assert everywhere(comm, np.array_equal(total, comm.allreduce(gradient)))
    assert everywhere(comm, not remembered(pipeline).any())
    assert pipeline.traffic.bytes_sent == round(2 * 2000 * (comm.Get_size() - 1) / comm.Get_size())


def test_dense_steps_at_the_start_flush_nothing_and_lose_nothing(comm):
    pipeline = build(comm, 500, density=0.01, collective="oktopk", options={"dense_steps": 2})
    generator = np.random.default_rng(comm.Get_rank())
    for number in range(4):
        gradient = eighths(generator, 500)
        before = comm.allreduce(remembered(pipeline) + gradient)
        total = step(pipeline, gradient)
        assert everywhere(comm, np.array_equal(total + comm.allreduce(remembered(pipeline)), before))
        assert everywhere(comm, remembered(pipeline).any() == (number >= 2))


def test_ranks_that_hold_different_positions_agree_on_k(comm):
    """A parameter frozen on some ranks only: the others' k would otherwise differ, and with it what a total holds."""
    pipeline = build(comm, 400, density=0.05, collective="oktopk")
    half = comm.Get_rank() % 2
    gradient = eighths(np.random.default_rng(comm.Get_rank()), 400)
    output = np.zeros(400, np.float32)
    pipeline.run([(0, gradient[: 400 - 200 * half])], [(0, output)], Step())
    assert same_bits(comm, output)


def test_without_memory_the_rest_is_dropped(comm):
    pipeline = build(comm, 100, density=0.1, memory="none")
    gradient = np.arange(100, dtype=np.float32)
    first, second = step(pipeline, gradient), step(pipeline, gradient)
    assert everywhere(comm, np.array_equal(first, second))
    assert everywhere(comm, np.count_nonzero(first) == 10)


def test_held_positions_keep_their_residual_and_send_nothing(comm):
    pipeline = build(comm, 100, density=0.05)
    gradient = np.ones(100, np.float32)
    step(pipeline, gradient)
    before = remembered(pipeline)
    output = np.empty(100, np.float32)
    pipeline.run([(50, gradient[50:])], [(0, output)], Step())
    assert everywhere(comm, np.array_equal(remembered(pipeline)[:50], before[:50]))
    assert everywhere(comm, not output[:50].any() and output[50:].any())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_gradient_reaches_every_rank_and_leaves_every_residual(comm, bad):
    pipeline = build(comm, 100)
    generator = np.random.default_rng(comm.Get_rank())
    step(pipeline, eighths(generator, 100))
    before = remembered(pipeline)
    gradient = eighths(generator, 100)
    if comm.Get_rank() == comm.Get_size() - 1:
        gradient[17] = bad
    total = step(pipeline, gradient)
    assert everywhere(comm, not np.isfinite(total[17]) and np.isfinite(np.delete(total, 17)).all())
    assert everywhere(comm, np.array_equal(before, remembered(pipeline)))


def test_a_changed_learning_rate_keeps_the_residual_the_same_update(comm):
    pipeline = build(comm, 64, density=0.1)
    gradient = eighths(np.random.default_rng(comm.Get_rank()), 64)
    step(pipeline, gradient, learning_rate=0.5)
    owed = 0.5 * comm.allreduce(remembered(pipeline))
    total = step(pipeline, np.zeros(64, np.float32), learning_rate=0.125).astype(np.float64)
    assert everywhere(comm, np.array_equal(0.125 * (total + comm.allreduce(remembered(pipeline))), owed))


def test_a_learning_rate_of_zero_leaves_the_residual_alone(comm):
    pipeline = build(comm, 64, density=0.1)
    gradient = eighths(np.random.default_rng(comm.Get_rank()), 64)
    step(pipeline, gradient, learning_rate=0.5)
    owed = comm.allreduce(remembered(pipeline))
    first = step(pipeline, np.zeros(64, np.float32), learning_rate=0.0)
    second = step(pipeline, np.zeros(64, np.float32), learning_rate=0.5)
    assert everywhere(comm, np.array_equal(first + second + comm.allreduce(remembered(pipeline)), owed))


def test_a_step_without_backward_anywhere_is_refused_on_every_rank(comm):
    pipeline = build(comm, 10)
    step(pipeline, np.ones(10, np.float32))
    before = remembered(pipeline)
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*without backward.*call loss.backward"):
        step(pipeline, np.zeros(10, np.float32), idle=True)
    assert everywhere(comm, np.array_equal(before, remembered(pipeline)))


def test_a_rank_without_backward_contributes_zeros(comm):
    pipeline = build(comm, 10, density=1.0)
    idle = comm.Get_rank() != 0
    total = step(pipeline, np.full(10, 0.0 if idle else 2.0, np.float32), idle=idle)
    assert everywhere(comm, np.array_equal(total, np.full(10, 2.0)))


def test_a_failed_exchange_gives_everything_back(comm, monkeypatch):
    pipeline = build(comm, 100)
    gradient = eighths(np.random.default_rng(comm.Get_rank()), 100)
    step(pipeline, gradient)
    before = remembered(pipeline)

    def fail(vector, k):
        raise OSError("the network is down")

    monkeypatch.setattr(pipeline.collective, "allreduce", fail)
    with pytest.raises(OSError, match="down"):
        step(pipeline, gradient)
    assert everywhere(comm, np.array_equal(remembered(pipeline), before + gradient))


def test_a_restored_pipeline_goes_on_with_the_same_bits(comm):
    generator = np.random.default_rng(comm.Get_rank())
    first, second = (build(comm, 200, density=0.02) for _ in range(2))
    step(first, generator.standard_normal(200).astype(np.float32), learning_rate=0.3)
    second.load_state_dict(first.state_dict())
    gradient = generator.standard_normal(200).astype(np.float32)
    assert everywhere(
        comm, np.array_equal(step(first, gradient, learning_rate=0.2), step(second, gradient, learning_rate=0.2))
    )
    assert everywhere(comm, np.array_equal(remembered(first), remembered(second)))

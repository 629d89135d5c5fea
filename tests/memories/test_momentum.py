"""MomentumCorrection: momentum before selection, cleared where something was delivered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, eighths, made, normal, opened, send

from horovod_sparse.memories import MomentumCorrection
from horovod_sparse.rules import Place, Step
from horovod_sparse.vector import SparseVector


def state(memory):
    content = memory.state_dict()
    return content["residual"], content["velocity"]


def reference(residual, velocity, gradient, momentum, nesterov):
    if nesterov:
        velocity = momentum * (velocity + gradient)
        return residual + velocity + gradient, velocity
    velocity = momentum * velocity + gradient
    return residual + velocity, velocity


@settings(max_examples=60)
@given(
    size=st.integers(1, 60),
    k=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    nesterov=st.booleans(),
    masking=st.booleans(),
    returns=st.integers(0, 3),
)
def test_every_step_is_the_published_recursion(size, k, seed, nesterov, masking, returns):
    generator = np.random.default_rng(seed)
    memory = made(MomentumCorrection, size, momentum=0.5, nesterov=nesterov, masking=masking)
    residual = velocity = np.zeros(size, np.float32)
    for _ in range(4):
        gradient = 128 * eighths(generator, size)  # halves stay exact
        residual, velocity = reference(residual, velocity, gradient, np.float32(0.5), nesterov)
        accumulated, delivered = send(memory, gradient, k, returns=min(returns, k, size))
        assert np.array_equal(accumulated, residual)
        indices, values = delivered.entries
        residual[indices] = 0
        if masking:
            velocity[indices[values != 0]] = 0
        assert np.array_equal(state(memory), (residual, velocity))


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_masking_and_at_density_one_it_is_torchs_momentum(nesterov):
    parameter = torch.zeros(20, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    memory = made(MomentumCorrection, 20, momentum=0.9, nesterov=nesterov, masking=False)
    ours = np.zeros(20, np.float32)
    for seed in range(5):
        gradient = normal(seed, 20)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        ours -= np.float32(0.1) * send(memory, gradient, None)[1].values
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_an_entry_that_came_back_in_part_counts_as_delivered():
    """Rounding for the wire returns a little of every entry."""
    memory = made(MomentumCorrection, 4)
    accumulator = opened(memory, np.array([8, 1, 4, 2], np.float32))
    vector = accumulator.take_largest(2)
    memory.close(accumulator, vector, SparseVector(vector.indices, np.array([0.5, 4], np.float32), 4))
    residual, velocity = state(memory)
    assert residual.tolist() == [0.5, 1, 4, 2]
    assert velocity.tolist() == [0, 1, 4, 2]


def test_a_dense_step_clears_everything_but_what_is_held():
    memory = made(MomentumCorrection, 4)
    send(memory, np.ones(4, np.float32), 0)
    accumulator = memory.open(Step(gradients=[(1, np.ones(2, np.float32))]), 1.0)
    vector = accumulator.take_all()
    memory.close(accumulator, vector, vector.nothing())
    residual, velocity = state(memory)
    assert residual.tolist() == [1, 0, 0, 1]
    assert velocity.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("gradient", "expected"), [([3, 4], [0.6, 0.8]), ([0.5, 0], [0.5, 0])])
def test_this_ranks_gradient_is_clipped_to_its_share_of_the_norm(gradient, expected):
    memory, gradient = made(MomentumCorrection, Place(2, LIKE, ranks=4), max_norm=2.0), np.array(gradient, np.float32)
    before = gradient.copy()
    send(memory, gradient, 0)
    assert state(memory)[1] == pytest.approx(expected)
    assert np.array_equal(gradient, before)

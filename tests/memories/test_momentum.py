"""MomentumCorrection: momentum before selection, cleared where something was delivered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.memories import MomentumCorrection
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.vector import SparseVector

LIKE = np.zeros(0, np.float32)


def state(memory):
    content = memory.state_dict()
    return content["residual"], content["velocity"]


def step(memory, gradient, k, scale=1.0, returns=0):
    """One step that gives back the last ``returns`` of the entries sent; returns the vector."""
    accumulator = memory.open([(0, gradient)], scale)
    vector = TopK(Place(gradient.size, LIKE)).take(accumulator, k, lambda array: array)
    kept = len(vector) - returns
    back = SparseVector(vector.indices[kept:], vector.values[kept:], vector.size)
    memory.close(accumulator, vector, back)
    return vector


def reference(residual, velocity, gradient, momentum, nesterov):
    if nesterov:
        velocity = momentum * (velocity + gradient)
        return residual + velocity + gradient, velocity
    velocity = momentum * velocity + gradient
    return residual + velocity, velocity


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
    memory = MomentumCorrection(Place(size, LIKE), momentum=0.5, nesterov=nesterov, masking=masking)
    returns = min(returns, k, size)
    residual = velocity = np.zeros(size, np.float32)
    for _ in range(4):
        gradient = (generator.integers(-64, 64, size) * 16).astype(np.float32)  # halves stay exact
        residual, velocity = reference(residual, velocity, gradient, np.float32(0.5), nesterov)
        vector = step(memory, gradient, k, returns=returns)
        sent = vector.indices[: len(vector) - returns]
        assert np.array_equal(vector.values, residual[vector.indices])
        residual[sent] = 0
        if masking:
            velocity[sent[vector.values[: sent.size] != 0]] = 0
        assert np.array_equal(state(memory), (residual, velocity))


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_masking_and_at_density_one_it_is_torchs_momentum(nesterov):
    parameter = torch.zeros(20)
    parameter.requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    memory = MomentumCorrection(Place(20, LIKE), momentum=0.9, nesterov=nesterov, masking=False)
    ours = np.zeros(20, np.float32)
    for seed in range(5):
        gradient = np.random.default_rng(seed).standard_normal(20).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        vector = step(memory, gradient, 20)
        ours[vector.indices] -= np.float32(0.1) * vector.values
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_an_entry_that_came_back_in_part_counts_as_delivered():
    """Rounding for the wire returns a little of every entry."""
    memory = MomentumCorrection(Place(4, LIKE))
    accumulator = memory.open([(0, np.array([8, 1, 4, 2], np.float32))], 1.0)
    vector = TopK(Place(4, LIKE)).take(accumulator, 2, lambda array: array)
    memory.close(accumulator, vector, SparseVector(vector.indices, np.array([0.5, 4], np.float32), 4))
    residual, velocity = state(memory)
    assert residual.tolist() == [0.5, 1, 4, 2]
    assert velocity.tolist() == [0, 1, 4, 2]


def test_a_failed_exchange_clears_nothing():
    memory = MomentumCorrection(Place(3, LIKE))
    for whole in (False, True):
        accumulator = memory.open([(0, np.ones(3, np.float32))], 1.0)
        vector = accumulator.take_all() if whole else accumulator.take_largest(2)
        memory.close(accumulator, vector, vector)
        assert state(memory)[1].all()


def test_a_dense_step_clears_everything_but_what_is_held():
    memory = MomentumCorrection(Place(4, LIKE))
    for gradients in ([(0, np.ones(4, np.float32))], [(1, np.ones(2, np.float32))]):
        accumulator = memory.open(gradients, 1.0)
        vector = accumulator.take_all() if len(gradients[0][1]) < 4 else accumulator.take_largest(0)
        memory.close(accumulator, vector, vector.nothing())
    residual, velocity = state(memory)
    assert residual.tolist() == [1, 0, 0, 1]
    assert velocity.tolist() == [1, 0, 0, 1]


def test_a_new_learning_rate_rescales_both():
    memory = MomentumCorrection(Place(2, LIKE), momentum=0.5)
    step(memory, np.array([4, 8], np.float32), 0)
    step(memory, np.zeros(2, np.float32), 0, scale=0.5)
    residual, velocity = state(memory)
    assert velocity.tolist() == [1, 2]  # 4 * scale * momentum
    assert residual.tolist() == [3, 6]  # 4 * scale + velocity


def test_this_ranks_gradient_is_clipped_to_its_share_of_the_norm():
    memory = MomentumCorrection(Place(2, LIKE, ranks=4), max_norm=2.0)
    gradient = np.array([3, 4], np.float32)
    step(memory, gradient, 0)
    assert np.linalg.norm(state(memory)[1]) == pytest.approx(1.0)
    assert gradient.tolist() == [3, 4]
    small = np.array([0.1, 0], np.float32)
    memory = MomentumCorrection(Place(2, LIKE, ranks=4), max_norm=2.0)
    step(memory, small, 0)
    assert np.array_equal(state(memory)[1], small)


def test_a_restored_one_goes_on():
    generator = np.random.default_rng(3)
    one, other = (MomentumCorrection(Place(50, LIKE)) for _ in range(2))
    step(one, generator.standard_normal(50).astype(np.float32), 5)
    other.load_state_dict(one.state_dict())
    gradient = generator.standard_normal(50).astype(np.float32)
    pair = [step(memory, gradient, 5) for memory in (one, other)]
    assert np.array_equal(pair[0].values, pair[1].values)
    assert np.array_equal(state(one), state(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"max_norm": 0.0}, "max_norm must be above 0, not 0.0; None does not clip"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MomentumCorrection(Place(2, LIKE), **options)

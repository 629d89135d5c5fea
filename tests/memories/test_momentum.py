"""MomentumCorrection: momentum before selection, cleared where something was delivered."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import eighths, made, normal, opened, send

from horovod_sparse.memories import MomentumCorrection
from horovod_sparse.rules import BucketContext, Momentum, Step
from horovod_sparse.vector import SparseVector


def state(memory):
    content = memory.state_dict()
    return content["residual"], content["velocity"]


def reference(residual, velocity, gradient, momentum, nesterov, share=1):
    velocity = momentum * velocity + np.float32(share) * gradient
    return residual + (gradient + momentum * velocity if nesterov else velocity), velocity


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


FORMS = [{}, {"nesterov": True}, {"dampening": 0.5}, {"dampening": 1.0}]


def momentum_of(factor, nesterov=False, dampening=0.0):
    return Momentum(factor, nesterov, 1 - dampening)


@settings(max_examples=30)
@given(size=st.integers(1, 60), k=st.integers(0, 60), seed=st.integers(0, 2**31), form=st.sampled_from(FORMS))
def test_the_optimizers_momentum_may_change_from_step_to_step(size, k, seed, form):
    generator, masking = np.random.default_rng(seed), bool(seed % 2)
    memory = made(MomentumCorrection, size, masking=masking)
    residual = velocity = np.zeros(size, np.float32)
    for number, factor in enumerate((0.5, 0.25, 0.0, 0.5)):
        gradient = 512 * eighths(generator, size)
        momentum = momentum_of(factor, **form)
        if factor:
            share = momentum.share if number else 1
            expected = reference(residual, velocity, gradient, np.float32(factor), momentum.nesterov, share)
        else:
            expected = residual + gradient, velocity
        now = Step(number=number, gradients=[(0, gradient)], momentum=momentum)
        accumulator = memory.open(now, 1.0)
        vector = accumulator.take_largest(min(k, size))
        memory.close(accumulator, vector, vector.nothing())
        residual, velocity = (array.copy() for array in expected)
        residual[vector.entries[0]] = 0
        if masking:
            velocity[vector.entries[0][vector.values != 0]] = 0
        assert np.array_equal(state(memory), (residual, velocity))


LOOKS = {
    "nothing": lambda accumulator: None,
    "sample": lambda accumulator: accumulator.sample(0, 2),
    "moments": lambda accumulator: accumulator.moments(),
    "block scores": lambda accumulator: accumulator.block_scores(4),
}


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_at_it_first_the_velocity_changes_once(look, nesterov):
    generator = np.random.default_rng(1)
    memory = made(MomentumCorrection, 40, momentum=0.5, nesterov=nesterov)
    residual = velocity = np.zeros(40, np.float32)
    for _ in range(3):
        gradient = 128 * eighths(generator, 40)
        residual, velocity = reference(residual, velocity, gradient, np.float32(0.5), nesterov)
        accumulator = memory.open(Step(gradients=[(0, gradient)]), 1.0)
        seen = LOOKS[look](accumulator)
        if look == "sample":
            assert np.array_equal(seen, residual[::2])
        if look == "moments":
            assert seen.largest == np.abs(residual).max()
        vector = accumulator.take_above(1.0)
        memory.close(accumulator, vector, vector.nothing())
        residual[vector.entries[0]] = 0
        assert np.array_equal(state(memory), (residual, velocity))


def test_nesterovs_form_belongs_to_a_momentum():
    with pytest.raises(ValueError, match=r"nesterov must be False, not True, where .*nesterov=True in the optimizer"):
        MomentumCorrection.Options(nesterov=True)


@pytest.mark.parametrize("masking", [False, True], ids=["", "masking"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_at_density_one_it_is_torchs_momentum(form, masking):
    """Whatever the learning rate and the momentum do: torch's buffer is a gradient."""
    parameter = torch.zeros(20, requires_grad=True, dtype=torch.float64)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, **form)
    memory = made(MomentumCorrection, BucketContext(20, np.zeros(0)), masking=masking)
    ours, before = np.zeros(20), 1.0
    for seed in range(60):
        gradient, rate = normal(seed, 20).astype(np.float64), (0.1, 0.01, 0.03)[seed // 20]
        factor = (0.9, 0.8, 0.95)[seed % 3]
        optimizer.param_groups[0].update(lr=rate, momentum=factor)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        now = Step(number=seed, gradients=[(0, gradient)], momentum=momentum_of(factor, **form))
        accumulator = memory.open(now, before / rate)
        vector = accumulator.take_all()
        memory.close(accumulator, vector, vector.nothing())
        ours, before = ours - rate * vector.values, rate
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
def test_the_velocity_follows_the_loss_scale_and_the_residual_its_unit(nesterov):
    memory = made(MomentumCorrection, 4, momentum=0.5, nesterov=nesterov)
    first, second = np.array([[8, 4, 2, 1], [16, 0, -8, 4]], np.float32)
    send(memory, first, 0)
    residual, velocity = state(memory)
    expected = reference(4 * residual, 0.25 * velocity, second, np.float32(0.5), nesterov)
    accumulator = memory.open(Step(gradients=[(0, second)], carry=0.25), 4.0)
    assert np.array_equal(accumulator.settle(), expected[0])
    assert np.array_equal(state(memory), expected)


def test_an_entry_that_came_back_in_part_counts_as_delivered():
    """Rounding for the wire returns a little of every entry."""
    memory = made(MomentumCorrection, 4, momentum=0.9, masking=True)
    accumulator = opened(memory, np.array([8, 1, 4, 2], np.float32))
    vector = accumulator.take_largest(2)
    memory.close(accumulator, vector, SparseVector(vector.indices, np.array([0.5, 4], np.float32), 4))
    residual, velocity = state(memory)
    assert residual.tolist() == [0.5, 1, 4, 2]
    assert velocity.tolist() == [0, 1, 4, 2]


def test_what_travels_whole_keeps_its_velocity():
    """Nothing of it has waited, so that nothing is out of date."""
    memory = made(MomentumCorrection, 4, momentum=0.9, masking=True)
    send(memory, np.ones(4, np.float32), 0)
    accumulator = memory.open(Step(gradients=[(1, np.ones(2, np.float32))]), 1.0)
    vector = accumulator.take_all()
    memory.close(accumulator, vector, vector.nothing())
    residual, velocity = state(memory)
    assert residual.tolist() == [1, 0, 0, 1]
    assert velocity.tolist() == pytest.approx([1, 1.9, 1.9, 1])


@pytest.mark.parametrize(("norm", "factor"), [(5, 0.2), (1.0, 1), (0.0, 1), (math.inf, 1), (math.nan, 1)])
def test_a_norm_is_clipped_to_this_ranks_share_of_it(norm, factor):
    assert MomentumCorrection.Options(max_norm=2.0).clip(norm, ranks=4) == factor
    assert MomentumCorrection.Options().clip(norm, ranks=4) == 1

"""MomentumCorrection: momentum before selection, cleared where something was delivered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import eighths, made, send

from horovod_sparse.memories import MomentumCorrection
from horovod_sparse.rules import Mode, Momentum, Step


def state(memory):
    content = memory.state_dict()
    return content["residual"], content["velocity"]


def reference(residual, velocity, gradient, momentum, fresh, share=1):
    velocity = np.float32(momentum) * velocity + np.float32(share) * gradient
    newest = np.float32(fresh / (1 - momentum) * share) * gradient
    return residual + (newest + np.float32(1 - fresh) * velocity), velocity


def converted(residual, velocity, to_gradients, momentum, share, weight):
    """Return what the optimizer's momentum delivers of a gradient over time, and what the velocity delivers."""
    factor = np.float32((1 - momentum) / share)
    if not to_gradients:
        return residual * (1 / factor), velocity
    return factor * (residual + np.float32(weight * momentum / (1 - momentum)) * velocity), 0 * velocity


FORMS = [{}, {"nesterov": True}, {"dampening": 0.5}]
FRESH = [None, 0.0, 0.25, 1.0]
# What a sparsifier may look at before it selects.
LOOKS = [
    lambda accumulator, residual: True,
    lambda accumulator, residual: np.array_equal(accumulator.sample(0, 2), residual[::2]),
    lambda accumulator, residual: accumulator.moments().largest == np.abs(residual).max(),
    lambda accumulator, residual: accumulator.block_scores(len(residual))[0] == np.square(residual, dtype=float).sum(),
]


def momentum_of(factor, nesterov=False, dampening=0.0):
    return Momentum(factor, nesterov, 1 - dampening)


@settings(max_examples=150)
@given(
    size=st.integers(1, 60),
    k=st.integers(0, 60),
    seed=st.integers(0, 2**31),
    form=st.sampled_from(FORMS),
    fresh=st.sampled_from(FRESH),
    dense=st.lists(st.booleans(), min_size=4, max_size=4),
    own=st.booleans(),
    masking=st.booleans(),
    look=st.sampled_from(LOOKS),
    above=st.booleans(),
    returns=st.integers(0, 3),
)
def test_every_step_equals_the_published_recursion(
    size, k, seed, form, fresh, dense, own, masking, look, above, returns
):
    """With configured momentum, or with the optimizer's, which may change from step to step.

    The velocity changes once, whichever method reads the accumulator first. In dense steps the optimizer applies its
    own momentum, and the memory converts what it holds.
    """
    generator, own = np.random.default_rng(seed), own and "dampening" not in form
    memory = made(MomentumCorrection, size, masking=masking, fresh=fresh, **({"momentum": 0.5, **form} if own else {}))
    residual = velocity = np.zeros(size, np.float32)
    plain = False
    for number, factor in enumerate((0.5, 0.5, 0.5, 0.5) if own else (0.5, 0.75, 0.0, 0.5)):
        gradient, momentum = 512 * eighths(generator, size), momentum_of(factor, **form)  # products stay exact
        settings = {"momentum": Momentum() if own else momentum, "mode": Mode.ALL if dense[number] else Mode.SELECT}
        step = Step(number=number, gradients=[(0, gradient)], **settings)
        if factor:
            share = momentum.share if number else 1
            own_form = fresh is None or (own and dense[number])
            now = momentum.nesterov * (1 - factor) if own_form else fresh
            if not own and dense[number] != plain:
                residual, velocity = converted(residual, velocity, dense[number], factor, momentum.share, 1 - now)
            plain = dense[number] and not own
        if factor and not plain:
            residual, velocity = reference(residual, velocity, gradient, factor, now, share)
        else:
            residual = residual + gradient
        accumulator = memory.open(step, 1.0)
        assert look(accumulator, residual)
        vector = accumulator.take_above(64.0 * k) if above else accumulator.take_largest(min(k, size))
        delivered, returned = vector.cut(max(0, len(vector) - returns))
        memory.close(accumulator, vector, returned)
        indices, values = delivered.entries
        assert np.array_equal(values, residual[indices])
        residual[indices] = 0
        if masking:
            velocity[indices[values != 0]] = 0
        assert np.array_equal(state(memory), (residual, velocity))


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
def test_the_velocity_follows_the_loss_scale_and_the_residual_its_unit(nesterov):
    memory = made(MomentumCorrection, 4, momentum=0.5, nesterov=nesterov)
    first, second = np.array([[8, 4, 2, 1], [16, 0, -8, 4]], np.float32)
    send(memory, first, 0)
    residual, velocity = state(memory)
    expected = reference(4 * residual, 0.25 * velocity, second, 0.5, 0.5 * nesterov)
    accumulator = memory.open(Step(gradients=[(0, second)], carry=0.25), 4.0)
    assert np.array_equal(accumulator.settle(), expected[0])
    assert np.array_equal(state(memory), expected)


@pytest.mark.parametrize(("norm", "factor"), [(5, 0.2), (1.0, 1), (0.0, 1), (math.inf, 1), (math.nan, 1)])
def test_the_norm_is_clipped_to_this_ranks_share(norm, factor):
    assert MomentumCorrection.Options(max_norm=2.0).clip(norm, ranks=4) == factor
    assert MomentumCorrection.Options().clip(norm, ranks=4) == 1

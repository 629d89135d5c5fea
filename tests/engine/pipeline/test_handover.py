"""Handover: the optimizer's own momentum reproduces what the memory delivers; the rest of its buffer decays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.engine.pipeline.handover import Handover
from horovod_sparse.rules import BucketContext, Mode, Momentum, SparseVector

SIZE = 12


def delivered(generator, kind):
    """Return a vector of some positions, or of all."""
    values = generator.standard_normal(SIZE)
    if kind == "all":
        return SparseVector.full(values)
    indices = np.flatnonzero(generator.random(SIZE) < 0.4).astype(np.int32)
    return SparseVector(indices, values[indices], SIZE)


def written(vector):
    dense = np.zeros(SIZE)
    dense[slice(None) if vector.indices is None else vector.indices] = vector.values
    return dense


def made():
    return Handover(BucketContext(SIZE, np.empty(0)))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(["some", "all", "dense step"]), min_size=1, max_size=200),
    dampening=st.sampled_from([0.0, 0.5]),
    loaded=st.booleans(),
    averages=st.booleans(),
)
def test_the_buffer_is_what_was_delivered_plus_a_rest_that_decays(seed, kinds, dampening, loaded, averages):
    """Momentum varies and is absent in some steps, steps are skipped, and training restarts.

    The rest gets dense steps.
    """
    generator, handover = np.random.default_rng(seed), made()
    buffer = generator.standard_normal(SIZE) * loaded
    rest = buffer.copy()
    for kind in kinds:
        factor = generator.choice([0.0, 0.5, 0.9, 0.95])
        momentum = Momentum(factor, share=1 - dampening, averages=averages)
        scale, total = generator.choice([1.0, 1.0, 4.0]), delivered(generator, "all" if kind == "dense step" else kind)
        handover.rescale(scale)  # as if the loss scale had changed
        buffer, rest = scale * buffer, scale * rest
        gradient = written(handover.gradient(total, momentum, Mode.ALL if kind == "dense step" else Mode.SELECT))
        if not factor and not averages:
            assert np.array_equal(gradient, written(total))
            handover.commit()
            continue
        if generator.random() < 0.1:  # a step that the optimizer does not apply
            continue
        handover.commit()
        buffer = factor * buffer + momentum.share * gradient
        rest = factor * rest + (momentum.share * written(total) if kind == "dense step" else 0)
        held = np.zeros(SIZE) if kind == "dense step" else written(total)
        assert np.array_equal(written(handover.held), held)
        assert np.allclose(buffer, held + rest, rtol=1e-9, atol=1e-9)
        again = made()
        again.load_state_dict(handover.state_dict())
        handover = again


@pytest.mark.parametrize(
    ("indices", "message"),
    [([1], "1 indices do not fit 2 values"), ([5, 3], "ascending"), ([3, SIZE], "ascending"), ([-1, 3], "ascending")],
)
def test_a_damaged_state_is_refused(indices, message):
    handover = made()
    state = {"indices": np.array(indices, np.int32), "values": np.ones(2), "mode": "select"}
    with pytest.raises(ValueError, match=message):
        handover.load_state_dict(state)

"""ImprovedContractive: what the error compressor misses is fed back, too."""

from __future__ import annotations

import numpy as np
import pytest
from memories.errors import block, built, eighths, held, step

from horovod_sparse.memories import Contractive, ImprovedContractive

SIZE = 400
KINDS = [
    {"version": 1},
    {"version": 2},
    {"version": 1, "compressor": "quantize", "bits": 4},
    {"version": 2, "compressor": "quantize", "bits": 4},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_in_expectation_what_is_held_is_what_was_not_delivered(options):
    gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    positions = block(np.random.default_rng(1), SIZE, 40)
    samples = []
    for seed in range(400):
        memory = built(ImprovedContractive, SIZE, seed=seed, **options)
        _, delivered = step(memory, gradient, positions, returns=7)
        samples.append(held(memory, SIZE))
    error = np.std(samples, 0, ddof=1).max() / np.sqrt(len(samples))
    assert np.abs(np.mean(samples, 0) - (gradient - delivered)).max() <= 5 * error


@pytest.mark.parametrize("version", [1, 2])
def test_it_is_more_exact_than_the_plain_one(version):
    """With 4 bits: a second code of the first one's error; and the largest entries kept whole."""
    gradient = np.random.default_rng(2).standard_t(2, SIZE).astype(np.float32)
    errors = []
    for kind, options in ((Contractive, {}), (ImprovedContractive, {"version": version})):
        memory = built(kind, SIZE, compressor="quantize", bits=4, **options)
        _, delivered = step(memory, gradient, block(np.random.default_rng(3), SIZE, 40))
        errors.append(np.linalg.norm(held(memory, SIZE) - (gradient - delivered)))
    assert errors[1] < errors[0] / 2


def test_version_2_keeps_as_many_entries_as_were_sent_the_largest_of_the_error():
    memory, gradient = built(ImprovedContractive, SIZE, version=2), eighths(np.random.default_rng(4), SIZE)
    positions = block(np.random.default_rng(5), SIZE, 30)
    accumulated, delivered = step(memory, gradient, positions)
    state = memory.state_dict()
    rest = accumulated - delivered
    assert state["indices"].size == 30
    assert np.array_equal(state["values"], rest[state["indices"]])
    assert np.abs(np.delete(rest, state["indices"])).max() <= np.abs(state["values"]).min()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_dense_step_leaves_nothing_behind(options):
    memory = built(ImprovedContractive, SIZE, **options)
    step(memory, eighths(np.random.default_rng(6), SIZE), block(np.random.default_rng(7), SIZE, 30))
    accumulator = memory.open([(0, eighths(np.random.default_rng(8), SIZE))], 1.0)
    vector = accumulator.take_all()
    memory.close(accumulator, vector, vector.nothing())
    assert np.abs(held(memory, SIZE)).max() < 1e-4


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_restored_one_goes_on(options):
    one, other = (built(ImprovedContractive, SIZE, **options) for _ in range(2))
    generator = np.random.default_rng(9)
    for _ in range(3):
        step(one, generator.standard_normal(SIZE).astype(np.float32), block(generator, SIZE, 40))
    other.load_state_dict(one.state_dict())
    gradient, positions = generator.standard_normal(SIZE).astype(np.float32), block(generator, SIZE, 40)
    for _ in range(2):
        pair = [step(memory, gradient, positions, scale=0.5) for memory in (one, other)]
        assert all(map(np.array_equal, *pair))


def test_another_version_is_refused():
    with pytest.raises(ValueError, match="version must be 1 or 2, not 3"):
        built(ImprovedContractive, SIZE, version=3)

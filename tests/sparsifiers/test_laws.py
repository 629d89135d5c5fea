"""What every sparsifier must keep to, whatever its rule."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import SPARSIFIERS

# Options with which each works in a bucket of any size, and as often as possible in another way than in the last step.
OPTIONS = {
    "reusedtopk": {"tau_threshold": 3},
    "threshold": {"threshold": 2.0},
    "stable": {"block": 1, "refresh": 2},
    "multilevel": {"cf_min": 2.0},
}
CASES = [(name, OPTIONS.get(name, {})) for name in SPARSIFIERS]
CASES += [("randomk", {"shared": False}), ("stable", {"block": 7, "refresh": 1})]


def build(name, options, size, dtype=np.float32):
    options = {**options, "block": min(options["block"], size)} if "block" in options else options
    return SPARSIFIERS[name](Place(size, np.zeros(0, dtype), bucket=2, rank=1, ranks=3), **options)


@st.composite
def layouts(draw):
    """A size, and the parts of it that are not held."""
    size = draw(st.integers(1, 300))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    return size, draw(st.sampled_from([[(0, size)], list(zip(cuts[::2], cuts[1::2], strict=False))]))


def eighths(rng, size, spread, dtype):
    """Numbers whose sums are exact; the larger the spread, the fewer are zero or equal."""
    return (rng.integers(-spread, spread + 1, size) / 8).astype(dtype)


@pytest.mark.parametrize(("name", "options"), CASES)
@given(
    layout=layouts(),
    k=st.integers(1, 320),
    spread=st.sampled_from([0, 1, 200, 100_000]),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 999),
)
def test_nothing_is_lost_and_a_restored_one_takes_the_same(name, options, layout, k, spread, dtype, seed):
    size, parts = layout
    rng, sparsifier = np.random.default_rng(seed), build(name, options, size, dtype)
    buffer = eighths(rng, size, spread, dtype)
    for scale in (0.5, 1.0, 1.0):
        gradient = eighths(rng, size, spread, dtype)
        segments = [(start, gradient[start:stop]) for start, stop in parts]
        active = np.zeros(size, bool)
        for start, stop in parts:
            active[start:stop] = True
        before = buffer * dtype(scale) + np.where(active, gradient, 0)

        restored, same = build(name, options, size, dtype), buffer.copy()
        restored.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
        again = restored.take(Accumulator(same, segments, scale), k, lambda array: array)
        accumulator = Accumulator(buffer, segments, scale)
        vector = sparsifier.take(accumulator, k, lambda array: array)
        accumulator.settle()

        assert (vector.indices.dtype, vector.values.dtype, vector.size) == (np.int32, dtype, size)
        assert (np.diff(vector.indices) > 0).all()
        after = buffer.copy()
        after[vector.indices] += vector.values
        assert np.array_equal(after, before)
        assert not buffer[vector.indices][active[vector.indices]].any()
        assert not vector.values[~active[vector.indices]].any()  # what is held stays
        assert vector.shared == sparsifier.shares_indices
        assert np.array_equal(again.indices, vector.indices)
        assert np.array_equal(again.values, vector.values)
        assert np.array_equal(same, buffer)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_all_elements_may_be_asked_for(name, options, size):
    buffer = np.arange(2, size + 2, dtype=np.float32)
    vector = build(name, options, size).take(Accumulator(buffer, [(0, buffer * 0)]), size, lambda array: array)
    assert np.array_equal(vector.indices, np.arange(size))
    assert not buffer.any()


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38, 1e-45])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_extreme_numbers_neither_hang_nor_crash(name, options, bad, share):
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(1000).astype(np.float32)
    gradient[rng.random(1000) < share] = bad
    sparsifier, buffer = build(name, options, 1000), np.zeros(1000, np.float32)
    for _ in range(3):
        vector = sparsifier.take(Accumulator(buffer, [(0, gradient)]), 10, lambda array: array)
        assert (np.diff(vector.indices) > 0).all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_zeros_ask_for_no_more_than_k(name, options):
    buffer = np.zeros(500, np.float32)
    vector = build(name, options, 500).take(Accumulator(buffer, [(0, buffer.copy())]), 20, lambda array: array)
    assert len(vector) <= 21  # whole blocks of 7


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_global_generator_is_left_alone(name, options):
    before = random.getstate()
    np.random.seed(5)  # noqa: NPY002 - the global one is what must not be touched
    expected = np.random.RandomState(5).random()
    gradient = np.arange(100, dtype=np.float32)
    build(name, options, 100).take(Accumulator(np.zeros_like(gradient), [(0, gradient)]), 7, lambda array: array)
    assert random.getstate() == before
    assert np.random.random() == expected  # noqa: NPY002


@pytest.mark.parametrize("name", ["randomblock", "randomk", "dgc"])
@pytest.mark.parametrize("seed", [-1, 0.5, "one"])
def test_bad_seeds_are_refused(name, seed):
    with pytest.raises(ValueError, match=f"seed must be a whole number of at least 0, not {seed!r}"):
        build(name, {"seed": seed}, 10)

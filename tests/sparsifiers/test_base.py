"""The laws of every sparsifier."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import made, normal, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.testing import sparsifiers as testing
from horovod_sparse.sparsifiers import SPARSIFIERS

# Options with which each works in a bucket of any size, and as often as possible in another way than in the last step.
OPTIONS = {
    "reusedtopk": {"tau_threshold": 3},
    "threshold": {"threshold": 2.0},
    "chunked": {"chunk": 50},
    "stable": {"block": 1, "refresh": 2},
    "arctopk": {"block": 1, "refresh": 2},
    "multilevel": {"cf_min": 2.0},
}
CASES = [(name, OPTIONS.get(name, {})) for name in SPARSIFIERS]
CASES += [("randomk", {"shared": False}), ("stable", {"block": 7, "refresh": 1}), ("arctopk", {"block": 7})]
every_rule = pytest.mark.parametrize(("name", "options"), CASES)


# Of these, the ranks select different parts of the bucket, and all of it together.
DIVIDED = ("micro", "exdyna", "deft", "artopk")


def build(name, options, size, dtype=np.float32, rank=1):
    options = {**options, "block": min(options["block"], size)} if "block" in options else options
    return made(SPARSIFIERS[name], BucketContext(size, np.zeros(0, dtype), bucket=2, rank=rank, ranks=3), **options)


@st.composite
def layouts(draw):
    """A size, and the parts of it that are not held."""
    size = draw(st.integers(1, 300))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    return size, draw(st.sampled_from([[(0, size)], list(zip(cuts[::2], cuts[1::2], strict=False))]))


@every_rule
@settings(max_examples=30)
@given(
    layout=layouts(),
    k=st.integers(1, 320),
    spread=st.sampled_from([0, 1, 200, 100_000]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 999),
)
def test_nothing_is_lost_and_a_restored_sparsifier_selects_the_same(name, options, layout, k, spread, dtype, seed):
    size, parts = layout
    bucket = testing.Bucket(size, tuple(parts), k, spread, dtype)
    failures, _ = testing.take(lambda: build(name, options, size, dtype), bucket, np.random.default_rng(seed))
    assert not failures


@every_rule
@pytest.mark.parametrize("size", [1, 2, 100])
def test_k_may_be_the_size_of_the_bucket(name, options, size):
    gradient = np.arange(2, size + 2, dtype=np.float32)
    taken = [take(build(name, options, size, rank=rank), gradient, size) for rank in range(3)]
    if name in DIVIDED:
        assert np.array_equal(np.sort(np.concatenate([vector.indices for vector, _ in taken])), np.arange(size))
    for vector, rest in taken:
        assert name in DIVIDED or np.array_equal(vector.indices, np.arange(size))
        assert np.array_equal(np.flatnonzero(rest == 0), vector.indices)


@every_rule
def test_at_most_k_zeros_are_selected(name, options):
    assert len(take(build(name, options, 500), np.zeros(500, np.float32), 20)[0]) <= 21  # whole blocks of 7


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_no_temporary_array_of_the_buckets_size_is_allocated(name):
    """Bytes per element of the bucket; for random positions, memory in the order of k."""
    size, most = 1_000_000, {"randomk": 0.1, "randomblock": 0.1, "multilevel": 2}.get(name, 1)
    accumulator = Accumulator(np.zeros(size, np.float32), [(0, normal(0, size))])
    accumulator.settle()
    sparsifier = made(SPARSIFIERS[name], size, **({"threshold": 3.0} if name == "threshold" else {}))
    tracemalloc.start()
    try:
        sparsifier.take(accumulator, size // 1000, Step())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most * size


@every_rule
def test_global_random_generators_are_not_used(name, options):
    before = random.getstate()
    np.random.seed(5)  # noqa: NPY002 - the global one is what must not be touched
    expected = np.random.RandomState(5).random()
    take(build(name, options, 100), np.arange(100, dtype=np.float32), 7)
    assert random.getstate() == before
    assert np.random.random() == expected  # noqa: NPY002

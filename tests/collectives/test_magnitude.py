"""kth_magnitude: the exact k-th largest of values on many ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples

from horovod_sparse.collectives.magnitude import kth_magnitude

pytestmark = pytest.mark.law

KINDS = {
    "normal": lambda generator, n: generator.standard_normal(n),
    "tied": lambda generator, n: generator.integers(-2, 3, n),
    "wide": lambda generator, n: np.exp(generator.uniform(-80, 80, n)) * generator.choice([-1, 1], n),
    "zero": lambda generator, n: np.zeros(n),
    "denormal": lambda generator, n: generator.integers(0, 50, n) * 1e-45,
}


@examples(30)
@given(
    seed=st.integers(0, 2**31),
    most=st.sampled_from([0, 1, 300]),
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(["float32", "float64"]),
    share=st.floats(0, 1.2),
    tight=st.booleans(),
)
def test_kth_magnitude_equals_that_of_sorting_all_values(transport, seed, most, kind, dtype, share, tight):
    parts = []
    for rank in range(transport.size):
        generator = np.random.default_rng([seed, rank])
        parts.append(KINDS[kind](generator, generator.integers(0, most + 1)).astype(dtype))
    everything = np.sort(np.abs(np.concatenate(parts)))[::-1]
    limit = everything.size if tight else 2**31
    k = max(1, round(share * everything.size))
    kth = kth_magnitude(transport.channel(), parts[transport.rank], k, limit)
    if k > everything.size:
        assert everywhere(transport, kth == (0.0, 1, 1))
        return
    value = float(everything[k - 1])
    above, equal = int((everything > value).sum()), int((everything == value).sum())
    assert everywhere(transport, kth == (value, equal, k - above))

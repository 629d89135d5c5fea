"""RandomBlock: consecutive positions, the same on every rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import made, take

from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers import RandomBlock


@settings(max_examples=60)
@given(size=st.integers(1, 60), k=st.integers(1, 70), number=st.integers(0, 50))
def test_k_consecutive_positions_are_selected_with_wrap_around(size, k, number):
    indices = take(made(RandomBlock, size), np.ones(size, np.float32), k, number)[0].indices
    assert len(indices) == min(k, size)
    gaps = np.diff(np.append(indices, indices[0] + size)) - 1
    assert np.count_nonzero(gaps) <= 1  # what is not taken is consecutive, too


def test_every_position_is_selected_eventually():
    sparsifier, seen = made(RandomBlock, 50), np.zeros(50, bool)
    for number in range(100):
        seen[take(sparsifier, np.ones(50, np.float32), 5, number)[0].indices] = True
    assert seen.all()


@settings(max_examples=60)
@given(size=st.integers(1, 60), k=st.integers(1, 70), part=st.integers(0, 70), number=st.integers(0, 50))
def test_narrowing_gives_the_block_of_a_smaller_k(size, k, part, number):
    sparsifier, values = made(RandomBlock, size), np.arange(1, size + 1, dtype=np.float32)
    narrowed = sparsifier.narrow(take(sparsifier, values, k, number)[0], part, Step(number=number))
    expected = take(sparsifier, values, min(part, k), number)[0]
    assert narrowed.shared
    assert np.array_equal(narrowed.indices, expected.indices)
    assert np.array_equal(narrowed.values, expected.values)

"""SparseVector: indices and values, or a dense vector."""

from __future__ import annotations

import numpy as np

from horovod_sparse import SparseVector


def test_plus_adds_in_the_order_given_and_leaves_empty_vectors_out():
    def sparse(indices, values):
        return SparseVector(np.array(indices, np.int32), np.array(values, np.float32), 10)

    one, other, nothing = sparse([1, 4], [1e8, 1]), sparse([1, 2], [1, 3]), sparse([], [])
    total = one.plus(other, None, nothing, sparse([1], [-1e8]))
    assert (total.indices.tolist(), total.values.tolist(), total.size) == ([1, 2, 4], [0, 3, 1], 10)
    assert one.plus(nothing) is nothing.plus(one, None) is one
    assert nothing.plus() is nothing


def test_a_vector_can_be_split_by_magnitude_or_by_another_vectors_positions():
    vector = SparseVector(np.array([1, 4, 5, 7], np.int32), np.array([-3, 2, 3, -2], np.float32), 10)
    parts = [*vector.cut(3), vector.without(vector.cut(2)[0])]
    assert [part.indices.tolist() for part in parts] == [[1, 4, 5], [7], [4, 7]]
    assert [part.values.tolist() for part in parts] == [[-3, 2, 3], [-2], [2, -2]]
    assert vector.cut(4)[0] is vector

"""SharedIndices: only values are sent."""

from __future__ import annotations

import pytest
from laws import Case, check_exchange, everywhere, make, own_vector

pytestmark = pytest.mark.law


@pytest.mark.parametrize(("wire", "width"), [(None, 4), ("bfloat16", 2)])
def test_values_are_sent_in_two_phases_without_indices(transport, wire, width):
    collective, ranks = make(transport, "shared", wire=wire), transport.size
    reduced = check_exchange(transport, collective, Case(4000 * ranks, "everything"))
    assert wire or len(reduced.returned) == 0
    assert everywhere(transport, 0 <= collective.traffic.bytes_sent - 2 * width * 4000 * (ranks - 1) <= 48 * ranks)


def test_vectors_whose_indices_differ_are_refused(transport):
    with pytest.raises(ValueError, match=rf"rank {transport.rank}: .*use a sparsifier whose indices"):
        make(transport, "shared").allreduce(own_vector(Case(100, "random"), transport), 10)

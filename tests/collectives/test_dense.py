"""Dense: one allreduce of the whole bucket."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, make, summed

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


def test_dense_selects_everything_and_sends_the_bytes_of_a_ring(transport):
    collective, ranks = make(transport, "dense"), transport.size
    assert collective.decide(50_000, 10)
    collective.allreduce(SparseVector.full(np.ones(50_000, np.float32)), 50_000)
    sent, received = collective.traffic.bytes_sent, collective.traffic.bytes_received
    assert everywhere(transport, abs(sent - 2 * 200_000 * (ranks - 1) / ranks) <= 8)  # unequal regions
    assert abs(summed(transport, sent) - summed(transport, received)) <= ranks  # rounded

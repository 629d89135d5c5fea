"""gTopk: a tree of merges keeps the k largest; the rank that drops an entry keeps it in its residual."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from laws import cases, check_exchange, everywhere, examples, make, summed

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


def sparse(indices, values, size=100):
    return SparseVector(np.array(indices, np.int32), np.array(values, np.float32), size)


@examples(12)
@given(case=cases(most=1000))
def test_the_total_is_k_sparse(transport, case):
    assert len(check_exchange(transport, make(transport, "gtopk", case.dtype), case).total) <= case.k


def test_sends_4k_log_p_words_at_most(transport):
    k, ranks = 10_000, transport.size
    collective = make(transport, "gtopk", indices="plain")
    collective.allreduce(sparse(np.arange(k), np.ones(k), 10 * k), k)
    levels = (ranks - 1).bit_length()
    traffic = collective.traffic
    assert everywhere(transport, traffic.bytes_sent + traffic.bytes_received <= 2 * 4 * (4 * k + 12) * levels)
    assert everywhere(transport, traffic.messages_sent + traffic.messages_received <= 2 * 2 * levels)
    assert summed(transport, traffic.bytes_sent) == 2 * (ranks - 1) * (8 * k + 24)

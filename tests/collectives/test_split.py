"""split_reduce: every owner sums its region, for every grouping of the messages."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, own_vector

from horovod_sparse.collectives.split import split_reduce
from horovod_sparse.wire import Wire

pytestmark = pytest.mark.law


def test_a_rank_sends_each_other_rank_one_message(transport):
    transport, mine = transport.channel(), own_vector(Case(1000, "everything"), transport)
    boundaries = np.linspace(0, 1000, transport.size + 1).astype(np.int64)
    split_reduce(transport, Wire.of(None, mine.values.dtype), mine, boundaries, throttle=2)
    traffic, others = transport.traffic, transport.size - 1
    assert (traffic.messages_sent, traffic.messages_received) == (others, others)
    sent = 8 * (1000 - np.diff(boundaries)[transport.rank])
    assert sent + 24 * others <= traffic.bytes_sent <= sent + 32 * others  # headers, and values up to a multiple of 8

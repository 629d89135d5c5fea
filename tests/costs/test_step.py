"""The closed form of the exposed time equals a simulation bucket by bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.costs.step import exposed

SECONDS = st.floats(0, 100)


def simulated(exchange, computing, count):
    """Time from the end of the backward pass to the end of the exchange of the last bucket."""
    backward, end = 2 / 3 * computing, 0.0
    for bucket in range(1, count + 1):
        end = max(end, backward * bucket / count) + exchange / count
    return end - backward


@given(exchange=SECONDS, computing=SECONDS, count=st.integers(1, 50))
def test_buckets_are_exchanged_when_they_are_ready_and_the_one_before_is_done(exchange, computing, count):
    assert exposed(exchange, computing, count) == pytest.approx(simulated(exchange, computing, count), abs=1e-9)


def test_one_bucket_is_not_hidden_at_all_and_of_many_only_the_last_is_not():
    assert exposed(7.0, 1e6, 1) == 7.0
    assert exposed(8.0, 1e6, 8) == 1.0

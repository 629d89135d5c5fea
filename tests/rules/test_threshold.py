"""ReusedThreshold: when it is renewed, and how it is adjusted in between."""

from __future__ import annotations

from collections import Counter

import pytest

from horovod_sparse.rules.threshold import ReusedThreshold

K = 100


def threshold(events=None):
    result = ReusedThreshold(4, low=0.5, high=1.5, up=1.1, down=1.2, events=events)
    result.renew(8.0, K)
    return result


def test_a_threshold_is_renewed_for_another_k_and_every_period_steps():
    assert ReusedThreshold(4, 0.5, 1.5, 1.1, 1.2).due(K)
    assert threshold().due(K + 1)
    one, due = threshold(), []
    for _ in range(8):
        due.append(one.due(K))
        one.renew(8.0, K) if due[-1] else one.reuse()
    assert due == [False, False, False, True] * 2


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("count", "value"), [(49, 8 / 1.2), (50, 8), (100, 8), (150, 8), (151, 8 * 1.1), (300, 8 * 1.1), (301, 8 * 1.1)]
)
def test_a_threshold_is_adjusted_only_outside_the_band_whose_upper_end_can_be_raised(count, value, times):
    one = threshold()
    assert one.holds(count, times) == (50 <= count <= 150 * times)
    assert one.value == value


def steps_until_it_is_reused(one):
    count = 0
    while one.due(K):
        one.renew(8.0, K)
        count += 1
    return count


def test_the_interval_grows_while_a_threshold_keeps_failing():
    one, waits = threshold(), []
    for _ in range(4):
        one.reuse()
        one.failed()
        one.renew(8.0, K)
        waits.append(steps_until_it_is_reused(one))
    assert waits == [1, 2, 4, 4]  # never longer than the period
    one.reuse()
    assert one.holds(K)
    one.failed()
    one.renew(8.0, K)
    assert steps_until_it_is_reused(one) == 1


def test_a_restored_threshold_continues():
    one, other = threshold(), threshold()
    one.reuse()
    assert not one.holds(200)
    one.failed()
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.value == 8 * 1.1


def test_renewals_and_reuses_are_counted():
    events = Counter()
    one = threshold(events)
    for count in (K, 10 * K, K):  # the second does not hold
        one.reuse()
        if not one.holds(count):
            one.failed()
            one.renew(2.0, K)
    assert events == {"thresholds_renewed": 2, "thresholds_reused": 2}

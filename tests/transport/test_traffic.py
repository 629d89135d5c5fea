"""Traffic: parts of an exchange add up."""

from __future__ import annotations

from horovod_sparse.transport.traffic import Traffic


def test_parts_add_up_and_stay_as_they_are():
    part, total = Traffic(1, 2, 3, 4), Traffic(10, 20, 30, 40)
    total.add(part)
    total.add(part)
    assert total == Traffic(12, 24, 36, 48)
    assert part == Traffic(1, 2, 3, 4)

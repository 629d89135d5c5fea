"""Rows of benchmarks.cluster.peers."""

from __future__ import annotations

from benchmarks.cluster import peers
from benchmarks.cluster.peers import Peer, line

RING = Peer("ring", "1gbit", [1700.0, 1600.0, 1650.0], 1500.0, 175.0)
OURS = Peer("oktopk", "1gbit", [200.0, 160.0, 180.0], 58.04, 3.53)


def test_a_row_shows_the_smallest_time_the_median_cpu_time_bytes_and_the_ratio_to_the_ring():
    assert line(OURS, [RING, OURS]).split() == ["oktopk", "160.0", "180.0", "58.0", "3.53", "10.00"]
    assert line(OURS, [OURS]).split() == ["oktopk", "160.0", "180.0", "58.0", "3.53"]
    assert len(line(RING, [RING])) == len(peers.HEAD)

"""benchmarks.cluster.peers: its rows, its command line, and what it asks of a contender."""

from __future__ import annotations

import json
from types import SimpleNamespace

from benchmarks.cluster import peers
from benchmarks.cluster.peers import Peer, line

RING = Peer("ring", "1gbit", [1700.0, 1600.0, 1650.0], 175.0)
OURS = Peer("oktopk", "1gbit", [200.0, 160.0, 180.0], 3.53)


def test_a_row_shows_the_smallest_time_the_median_the_bytes_and_the_ratio_to_the_ring():
    assert line(OURS, [RING, OURS]).split() == ["oktopk", "160.0", "180.0", "3.53", "10.00"]
    assert line(OURS, [OURS]).split() == ["oktopk", "160.0", "180.0", "3.53"]
    assert len(line(RING, [RING])) == len(peers.HEAD)


def test_the_last_line_of_a_contender_is_what_it_found():
    found = {"milliseconds": [3.0, 2.0], "megabytes": 1.5}
    asked = []

    def python(ranks, arguments, options):
        asked.append((ranks, arguments[2:], options))
        return f"a warning\n{json.dumps(found)}\n"

    cluster, options = SimpleNamespace(python=python), SimpleNamespace(nodes=4, parameters=110, rounds=2)
    assert peers.measure(cluster, "ddp", "none", options) == Peer("ddp", "none", [3.0, 2.0], 1.5)
    peers.measure(cluster, "ring", "none", options)
    peers.measure(cluster, "oktopk", "none", options)
    assert asked[1:] == [(4, ["ring", "10", "2"], peers.RING), (4, ["oktopk", "10", "2"], ())]
    assert "GLOO_SOCKET_IFNAME=eth0" in asked[0][2]

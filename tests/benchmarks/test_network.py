"""The emulated network's command lines, and what is read from its counters; needs neither root nor a network."""

from __future__ import annotations

import pytest

from benchmarks.cluster import network

SS_REPORT = """\
ESTAB 0 0 10.77.0.1:1024 10.77.0.2:37766
\t cubic wscale:7,7 rto:201 rtt:0.041/0.02 mss:1448 bytes_sent:9100 bytes_retrans:99 bytes_acked:9001 \
bytes_received:350 segs_out:12 segs_in:9 data_segs_out:8
ESTAB 0 36 10.77.0.1:53220 10.77.0.3:1024
\t cubic wscale:7,7 rto:201 mss:1448 bytes_sent:75036 bytes_acked:75001 bytes_received:1000000 segs_out:60
LISTEN 0 128 10.77.0.1:1024 0.0.0.0:*
\t cubic cwnd:10
ESTAB 0 0 10.77.0.1:53222 10.77.0.4:1024
\t cubic cwnd:10 bytes_received:4
"""


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 10**9), ("100mbit", 10**8), ("2.5gbit", 2_500_000_000), ("64kbit", 64_000)]
)
def test_rates_are_read_with_their_units(rate, bits):
    assert network.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "1 gbit", "-1gbit", "0mbit", "1gbits", "1tbit", "none"])
def test_invalid_rates_are_refused_by_name(rate):
    with pytest.raises(ValueError, match=f"{rate!r} is not a rate: write it like 100mbit"):
        network.bits_per_second(rate)


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "500mbit", "1gbit", "10gbit"])
def test_a_link_holds_a_packet_and_lets_little_pass_above_its_rate(rate):
    shaping = network.Shaping.at(rate)
    assert 8192 <= shaping.segment <= 65536  # what the kernel's bridge and TCP handle well
    assert shaping.burst == 2 * shaping.segment
    if 10**8 < shaping.rate < 2 * 10**9:  # between the limits
        assert shaping.segment * 8 / shaping.rate == pytest.approx(262e-6, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "segment", "discipline"),
    [("1gbit", 32750, "tbf rate 1000000000bit burst 65500b limit 1000b"), ("none", 65536, "noqueue")],
)
def test_a_rate_becomes_a_token_bucket_on_the_device_and_no_limit_removes_it(rate, segment, discipline):
    segments, bucket = network.rate_commands("eth0", rate, 1000)
    assert " ".join(segments) == f"ip link set eth0 gso_max_size {segment} gro_max_size {segment}"
    assert " ".join(bucket) == f"tc qdisc replace dev eth0 root {discipline}"


def test_a_node_knows_every_other_node_and_not_itself():
    neighbours = [command for command in network.node_commands("n1", 1, 4) if "neighbour" in command]
    known = {(command[command.index("replace") + 1], command[command.index("lladdr") + 1]) for command in neighbours}
    assert known == {(f"10.77.0.{number + 1}", f"02:77:00:00:00:{number:02x}") for number in (0, 2, 3)}


def test_the_payload_of_all_connections_is_added_up():
    assert network.socket_bytes(SS_REPORT) == (9001 + 75001, 350 + 1_000_000 + 4)
    assert network.socket_bytes("") == (0, 0)


def test_a_nodes_name_is_its_address_on_the_control_network():
    lines = network.hosts_file(["n0", "n1"]).splitlines()
    control, data = ["10.77.0.129 n0", "10.77.0.130 n1"], ["10.77.0.1 n0-data", "10.77.0.2 n1-data"]
    assert lines == ["127.0.0.1 localhost", *control, *data]


@pytest.mark.parametrize(("rate", "text"), [("100mbit", "100 Mbit/s"), ("2.5gbit", "2.5 Gbit/s"), ("none", "none")])
def test_a_rate_is_written_in_the_usual_notation(rate, text):
    assert network.written(rate) == text

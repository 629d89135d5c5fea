"""Command lines that build the emulated cluster's network, and parsers of its counters; runs nothing itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster.namespaces import on

# Every node has two links: eth0 carries the data; ctl0, which has no rate limit, MPI's launcher and the ranks' output.
DATA_NETWORK, CONTROL_NETWORK = "10.77.0.0/25", "10.77.0.128/25"
MAX_NODES = 64

# Bytes that may be queued at a node, where TCP keeps the queue short, and at a port of the switch. When many nodes send
# to the same node, the port drops what exceeds its buffer, as a data center switch does.
NODE_QUEUE, PORT_BUFFER = 16 * 2**20, 2**20

_LARGEST_SEGMENT = 65536
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}

Command = list[str]

# Without IPv6 there is no neighbor discovery, and with fixed neighbors no ARP: the counters show the programs' traffic.
_NO_IPV6 = ["sysctl", "-eqw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]


@dataclass(frozen=True)
class Shaping:
    """Traffic shaping of a link at one rate."""

    rate: int  # bits per second
    segment: int  # bytes of the largest packet that TCP passes to a link (GSO), which holds or releases it as a unit
    burst: int  # bytes that may pass at once after a pause, above the rate

    @classmethod
    def at(cls, rate: str) -> Shaping:
        """Return the shaping for a rate such as ``1gbit`` or ``100mbit``."""
        bits = bits_per_second(rate)
        # The bytes of a quarter of a millisecond. With half of that, two cores cannot keep up with 8 nodes at 1 Gbit/s;
        # with twice as much, messages of 128 KB pass without a limit.
        segment = min(max(round(bits / 8 * 262e-6), 8192), _LARGEST_SEGMENT)
        return cls(bits, segment, burst=2 * segment)


def bits_per_second(rate: str) -> int:
    """Convert a rate such as ``100mbit`` or ``2.5gbit`` to bits per second.

    Raises:
        ValueError: The rate is not a positive number followed by ``kbit``, ``mbit`` or ``gbit``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits == 0:
        raise ValueError(f"{rate!r} is not a rate: write it like 100mbit or 2.5gbit, or none for no limit")
    return bits


def written(rate: str) -> str:
    """Return a rate in the usual notation: 100 Mbit/s for ``100mbit``; other texts unchanged."""
    return re.sub(r"([\d.]+)([kmg])bit", lambda part: f"{part[1]} {part[2].upper().replace('K', 'k')}bit/s", rate)


def data_address(number: int) -> str:
    """Return a node's address on the data network."""
    return f"10.77.0.{number + 1}"


def control_address(number: int) -> str:
    """Return a node's address on the control network."""
    return f"10.77.0.{number + 129}"


def switch_commands() -> list[Command]:
    """Return the commands that create the switch: one bridge for the data links and one for the control links."""
    commands = [_NO_IPV6]
    for bridge in ("data", "control"):
        commands.append(["ip", "link", "add", bridge, "type", "bridge", "mcast_snooping", "0"])
        commands.append(["ip", "link", "set", bridge, "up"])
    return commands


def node_commands(node: str, number: int, nodes: int) -> list[Command]:
    """Return the commands that create node ``number`` of ``nodes`` in namespace ``node`` and connect it."""
    data = data_address(number)
    inside = [
        ["ip", "link", "set", "lo", "up"],
        _NO_IPV6,
        # Otherwise, a connection would start with the TCP metrics of another rate.
        ["sysctl", "-eqw", "net.ipv4.tcp_no_metrics_save=1"],
        ["ip", "address", "add", f"{data}/25", "dev", "eth0"],
        ["ip", "address", "add", f"{control_address(number)}/25", "dev", "ctl0"],
        ["ip", "link", "set", "eth0", "up"],
        ["ip", "link", "set", "ctl0", "up"],
        # The usual congestion control, independent of this machine's default. A namespace may set only what the
        # machine allows; a route may set any.
        ["ip", "route", "replace", DATA_NETWORK, "dev", "eth0", "src", data, "congctl", "cubic"],
        *(
            f"ip neighbour replace {data_address(other)} lladdr {_mac(other)} nud permanent dev eth0".split()
            for other in range(nodes)
            if other != number
        ),
    ]
    return [
        ["ip", "netns", "add", node],
        *_cable(node, "eth0", f"d{number}", "data", _mac(number)),
        *_cable(node, "ctl0", f"c{number}", "control", _mac(number + 128)),
        *(on(node, command) for command in inside),
    ]


def _mac(number: int) -> str:
    return f"02:77:00:00:00:{number:02x}"


def _cable(node: str, device: str, port: str, bridge: str, mac: str) -> list[Command]:
    """Return the commands that connect a node's device to a port of the switch."""
    return [
        ["ip", "link", "add", port, "type", "veth", "peer", "name", device, "address", mac, "netns", node],
        ["ip", "link", "set", port, "master", bridge, "up"],
    ]


def rate_commands(device: str, rate: str, buffer: int) -> list[Command]:
    """Return the commands that set the sending rate of a device; run them in the network of the device.

    ``none`` removes the limit. ``buffer`` is the number of bytes that may be queued at the device.
    """
    root = ["tc", "qdisc", "replace", "dev", device, "root"]
    if rate == "none":
        return [_segments(device, _LARGEST_SEGMENT), [*root, "noqueue"]]
    shaping = Shaping.at(rate)
    bucket = ["tbf", "rate", f"{shaping.rate}bit", "burst", f"{shaping.burst}b", "limit", f"{buffer}b"]
    return [_segments(device, shaping.segment), [*root, *bucket]]


def _segments(device: str, size: int) -> Command:
    return ["ip", "link", "set", device, "gso_max_size", str(size), "gro_max_size", str(size)]


def order_command(device: str) -> Command:
    """Return a command that makes one processor handle all packets of a connection (RPS).

    By default, a virtual link handles packets on the sender's current processor. TCP takes the reordering for loss.
    """
    processors = f"{(1 << min(os.cpu_count() or 1, 32)) - 1:x}"
    # /sys shows the devices of the network in which it was mounted.
    write = 'mount -t sysfs sysfs /sys && echo "$0" > "/sys/class/net/$1/queues/rx-0/rps_cpus"'
    return ["unshare", "--mount", "sh", "-c", write, processors, device]


def hosts_file(nodes: Sequence[str]) -> str:
    """Return the text of /etc/hosts: control addresses as NODE, for MPI's launcher, data addresses as NODE-data."""
    lines = [f"{control_address(number)} {node}" for number, node in enumerate(nodes)]
    lines += [f"{data_address(number)} {node}-data" for number, node in enumerate(nodes)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def socket_bytes(report: str) -> tuple[int, int]:
    """Return the payload in a report of ``ss -tin``: bytes sent and acknowledged, and bytes received."""
    sent, received = (re.findall(rf"\b{name}:(\d+)", report) for name in ("bytes_acked", "bytes_received"))
    return sum(map(int, sent)), sum(map(int, received))


def device_bytes(report: str) -> tuple[int, int]:
    """Return the bytes sent and received by the device in a report of ``ip -json -statistics link show``."""
    statistics = json.loads(report)[0]["stats64"]
    return statistics["tx"]["bytes"], statistics["rx"]["bytes"]

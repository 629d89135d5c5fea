"""Switch whose frames arrive late: links with latency, which only some kernels can add to a device (netem).

    python -I benchmarks/cluster/relay.py 0.005 d0 d1 d2 d3

forwards frames between the devices, each after 5 ms, until it is killed. The last byte of a frame's destination address
is the number of the device. It imports only the standard library.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

_ALL_PROTOCOLS = 3  # ETH_P_ALL, in network byte order for socket()
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
# Each frame comes with a header that describes what the network card would still have to do: checksums and segments.
_VNET_HEADER_BYTES = 10
_OUTGOING = 4  # PACKET_OUTGOING: sent by this relay
_LONGEST = 1 << 17


def relay(seconds: float, devices: Sequence[str]) -> None:
    """Forward frames between devices, each ``seconds`` after its arrival."""
    selector = selectors.DefaultSelector()
    ports = [_open(device) for device in devices]
    for port in ports:
        selector.register(port, selectors.EVENT_READ, port)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = selector.select(timeout)
        now = time.monotonic()
        for key, _ in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, address = key.data.recvfrom(_LONGEST)
                    number = frame[_VNET_HEADER_BYTES + 5]
                    if address[2] != _OUTGOING and number < len(ports):
                        waiting.append((now + seconds, ports[number], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a full queue drops frames
                port.send(frame)


def _open(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((device, _ALL_PROTOCOLS))
    port.setblocking(False)
    return port


if __name__ == "__main__":
    relay(float(sys.argv[1]), sys.argv[2:])

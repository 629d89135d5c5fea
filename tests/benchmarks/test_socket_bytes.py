"""The kernel's count of this process' own connections, and when it agrees with ours."""

from __future__ import annotations

import ipaddress
import socket
import time

import numpy as np
import pytest

from benchmarks.socket_bytes import Comparison, random_vector, socket_bytes

LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
ELSEWHERE = ipaddress.IPv4Network("192.0.2.0/24")
SENT = 300_000


def test_the_payload_of_open_connections_on_the_network_is_counted():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            before = np.array(socket_bytes(LOOPBACK))
            client.sendall(bytes(SENT))
            received = 0
            while received < SENT:
                received += len(connection.recv(SENT))
            deadline = time.monotonic() + 5  # the acknowledgement comes a little later
            while (counted := np.array(socket_bytes(LOOPBACK)) - before)[0] < SENT and time.monotonic() < deadline:
                time.sleep(0.01)
            assert counted.tolist() == [SENT, SENT]
            assert socket_bytes(ELSEWHERE) == (0, 0)


@pytest.mark.parametrize(
    ("counted", "agrees"), [(10_000, True), (9_901, True), (10_099, True), (9_899, False), (10_101, False)]
)
def test_a_count_that_is_off_by_more_than_a_hundredth_is_told(counted, agrees):
    sockets = np.full((2, 2), 10_000)
    for column in (0, 1):
        ours = sockets.copy()
        ours[:, column] = counted
        assert Comparison(ours, sockets).agrees() is agrees


def test_the_rank_that_is_farthest_off_is_shown():
    comparison = Comparison(np.array([[100, 100], [100, 100]]), np.array([[100, 80], [100, 120]]))
    assert comparison.ratios().tolist() == [1, 1]
    assert comparison.worst() == 100 / 80


def test_shared_vectors_have_the_same_positions_on_every_rank_and_others_do_not():
    first, second = (random_vector(1000, 50, rank, shared=True) for rank in (0, 1))
    assert np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.values, second.values)
    assert not np.array_equal(random_vector(1000, 50, 0, False).indices, random_vector(1000, 50, 1, False).indices)

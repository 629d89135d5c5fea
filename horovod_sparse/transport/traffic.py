"""Bytes and messages that this rank has sent and received; without MPI, as the cost model uses its constant."""

from __future__ import annotations

from dataclasses import dataclass

# Below this many bytes on all ranks together an allgather takes log2 P messages, above it a ring of P - 1.
RING_BYTES = 1 << 18


@dataclass(slots=True)
class Traffic:
    """Payload of this rank, in bytes and messages.

    Messages between two ranks are counted one by one. A collective of the MPI library is charged as the algorithm
    that moves the fewest bytes does it; which algorithm runs is the library's choice.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_received: int = 0
    messages_received: int = 0

    def send(self, nbytes: int) -> None:
        """Counts a message that left this rank."""
        self.bytes_sent += nbytes
        self.messages_sent += 1

    def receive(self, nbytes: int) -> None:
        """Counts a message that reached this rank."""
        self.bytes_received += nbytes
        self.messages_received += 1

    def both(self, sent: float, received: float, messages: int) -> None:
        """Counts as many messages that left this rank as reached it."""
        self.bytes_sent += round(sent)
        self.bytes_received += round(received)
        self.messages_sent += messages
        self.messages_received += messages

    def add(self, other: Traffic) -> None:
        """Adds what another part of the exchange has counted."""
        self.bytes_sent += other.bytes_sent
        self.messages_sent += other.messages_sent
        self.bytes_received += other.bytes_received
        self.messages_received += other.messages_received

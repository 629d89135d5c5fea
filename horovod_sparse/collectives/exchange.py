"""What every collective gives back, and the count of what it sent and received."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.vector import SparseVector


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Result of a sparse allreduce.

    Attributes:
        total: The reduced vector, the same bits on every rank.
        returned: The part of this rank's vector that total does not hold; it goes back to this rank's memory.
    """

    total: SparseVector
    returned: SparseVector


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

    def send(self, nbytes: float, messages: int = 1) -> None:
        """Counts ``messages`` messages of ``nbytes`` bytes together that left this rank."""
        self.bytes_sent += round(nbytes)
        self.messages_sent += messages

    def receive(self, nbytes: float, messages: int = 1) -> None:
        """Counts ``messages`` messages of ``nbytes`` bytes together that reached this rank."""
        self.bytes_received += round(nbytes)
        self.messages_received += messages

    def add(self, other: Traffic) -> None:
        """Adds what another part of the exchange has counted."""
        self.send(other.bytes_sent, other.messages_sent)
        self.receive(other.bytes_received, other.messages_received)

"""Counters of bytes and messages sent and received. Does not import MPI, as the cost model uses the limits."""

from __future__ import annotations

from dataclasses import dataclass, fields

# From this many bytes in total on, an allgather of P ranks takes P - 1 messages around a ring; below, log2 P messages.
RING_BYTES = 1 << 18
# Up to one of these limits, in bytes per rank and in total, an allreduce gathers the arrays and each rank adds them.
# This takes one round of messages instead of two. On more than ``DIRECT_RANKS``, it only does so if it waits at once.
GATHERED_SUM_BYTES, GATHERED_SUM_TOTAL = 256, 1 << 15


@dataclass(slots=True)
class Traffic:
    """Payload of this rank, in bytes and messages, and rounds of messages.

    A round is a wait for messages that other ranks send only after they have received those of the round before. An
    allgather counts as one, whatever its algorithm. Messages in flight together with those of another round add none.

    Point-to-point messages are counted individually. A collective of the MPI library is counted as the algorithm that
    moves the fewest bytes; the library may run another algorithm.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_received: int = 0
    messages_received: int = 0
    rounds: int = 0

    def send(self, nbytes: int) -> None:
        """Count a message that this rank sent."""
        self.bytes_sent += nbytes
        self.messages_sent += 1

    def receive(self, nbytes: int) -> None:
        """Count a message that this rank received."""
        self.bytes_received += nbytes
        self.messages_received += 1

    def both(self, sent: float, received: float, messages: int) -> None:
        """Count equal numbers of sent and received messages, with their bytes."""
        self.bytes_sent += round(sent)
        self.bytes_received += round(received)
        self.messages_sent += messages
        self.messages_received += messages

    def add(self, other: Traffic) -> None:
        """Add the counts of another part of the exchange."""
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(other, counter.name))

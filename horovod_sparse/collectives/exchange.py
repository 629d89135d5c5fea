"""What every collective gives back, and the count of what it sent."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.vector import SparseVector

# MPI counts are C ints: a larger message would wrap around.
MPI_COUNT_MAX = 2**31 - 1


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
    """Payload this rank has sent, in bytes and messages.

    A collective of the MPI library is charged as the algorithm that moves the fewest bytes does it (ring for
    Allgatherv and large Allreduce); which algorithm runs is the library's choice.
    """

    bytes: int = 0
    messages: int = 0

    def sent(self, nbytes: float, messages: int) -> None:
        """Adds ``messages`` messages of ``nbytes`` bytes together."""
        self.bytes += round(nbytes)
        self.messages += messages

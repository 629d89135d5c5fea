"""Memories keep the gradient entries that are not sent (error feedback); one file per rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.memories.conef import Contractive
from horovod_sparse.memories.improved import ImprovedContractive
from horovod_sparse.memories.momentum import MomentumCorrection
from horovod_sparse.memories.none import NoMemory
from horovod_sparse.memories.partial import Partial
from horovod_sparse.memories.residual import Residual
from horovod_sparse.rules import BucketContext, Stateful, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.vector import SparseVector


class Memory(Stateful, Protocol):
    """Error feedback of one bucket, built from the bucket's context and the memory's options.

    ``open`` starts a step and ``close`` ends it.

    Invariant: what ``open`` accumulates equals what is sent and not returned, plus what ``close`` remembers. Memories
    that compress the error keep this in expectation.

    Attributes:
        Options: Nested dataclass of the memory's options.
        replaces_momentum: Whether the memory applies momentum before the selection. ``Options`` then derives from that
            of ``MomentumCorrection``, so that what is sent dense gets the same momentum.
    """

    replaces_momentum: bool

    def __init__(self, context: BucketContext, options: Any) -> None: ...

    def open(self, step: Step, scale: float) -> Accumulator:
        """Start a step and return acc = scale * remembered + gradients, not yet summed."""

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """End the step: remember what is left in the accumulator plus ``returned``.

        Args:
            accumulator: Accumulator from ``open``, after the sparsifier took ``vector`` out of it.
            vector: Entries that were sent.
            returned: What goes back into this memory, as in ``Reduced``.
        """

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one state that holds the sum of several ranks' states, for a restart with another world size.

        Args:
            states: States from ``state_dict``, with NumPy arrays. With no states, the result holds nothing.

        Returns:
            A state for ``load_state_dict``, with NumPy arrays. This memory is not changed.

        Raises:
            ValueError: A state does not fit this memory.
        """


MEMORIES = Registry(
    "memory", Memory, [Residual, NoMemory, Contractive, Partial, ImprovedContractive, MomentumCorrection]
)

__all__ = [
    "MEMORIES",
    "Contractive",
    "ImprovedContractive",
    "Memory",
    "MomentumCorrection",
    "NoMemory",
    "Partial",
    "Residual",
]

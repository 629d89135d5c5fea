"""Memories keep what is not sent (error feedback), one file per rule."""

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
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.vector import SparseVector


class Memory(Protocol):
    """One bucket's memory; built from its place and the configuration's options.

    ``open`` starts a step, ``close`` ends it.

    Law: what ``open`` accumulates is what the sparsifier takes plus what the next ``open`` finds; in expectation, for
    the contractive ones.

    Attributes:
        Options: Nested dataclass of its options.
        replaces_momentum: Tells that it applies momentum itself, and the optimizer none. Its options then derive from
            those of ``MomentumCorrection``: optimizers apply the same momentum to what travels whole.
    """

    replaces_momentum: bool

    def __init__(self, context: BucketContext, options: Any) -> None: ...

    def open(self, step: Step, scale: float) -> Accumulator:
        """Starts a step: acc = scale * remembered + the step's gradients, not yet added up."""
        ...

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Ends the step: remembers what is left in the accumulator plus ``returned``.

        Args:
            accumulator: What ``open`` gave, after the sparsifier took ``vector`` out of it.
            vector: What was sent.
            returned: The part of ``vector`` that no rank applies; it comes back to this memory.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on. Arrays are not copied: see ``rules.snapshot``."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that holds what several states of one unit hold together, for another number of ranks.

        Args:
            states: As ``state_dict`` gives them, with NumPy arrays. None at all: the result holds nothing.

        Returns:
            A state for ``load_state_dict``, with NumPy arrays; this memory itself stays as it is.

        Raises:
            ValueError: A state does not fit this memory.
        """
        ...


MEMORIES = Registry(
    "memory",
    Memory,
    {
        "residual": Residual,
        "none": NoMemory,
        "conef": Contractive,
        "partial": Partial,
        "improved": ImprovedContractive,
        "momentum": MomentumCorrection,
    },
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

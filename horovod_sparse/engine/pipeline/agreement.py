"""Agreement of the ranks on what a step depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from horovod_sparse.transport.base import Transport


class Facts(NamedTuple):
    """Facts of a rank about a step, or their sums over the ranks.

    Attributes:
        working: Number of ranks with a backward pass.
        elements: Number of elements that take part, over all ranks.
        epochs: Sum of 1 + epoch over the working ranks that know it.
        resuming: Number of ranks whose gradients were added to the result of the exchange before.
        unsafe: Number of ranks whose gradients cannot be added to the memory, or summed over the ranks.
        replaced: Number of ranks whose optimizer's momentum was replaced since its last step.
    """

    working: int = 0
    elements: int = 0
    epochs: int = 0
    resuming: int = 0
    unsafe: int = 0
    replaced: int = 0

    @property
    def epoch(self) -> int | None:
        """The epoch of the working ranks; None: not known."""
        return self.epochs // self.working - 1 if self.epochs and self.working else None


class Agreement:
    """Sums of facts over the ranks, and those that held in the last step.

    Args:
        transport: Channel of the agreement.

    Attributes:
        transport: The channel.
        facts: Sums of the last step in which no rank was unsafe.
        stable: Whether these have not changed since the step before, so that the next step may rely on them.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.facts = Facts()
        self.stable = False

    def sum(self, mine: Facts) -> Facts:
        """Return the sums of the ranks' facts; a collective call."""
        return Facts(*self.transport.allreduce(np.array(mine, np.int64)).tolist())

    def begin_sum(self, mine: Facts) -> Callable[[], Facts]:
        """Start to sum the ranks' facts; return what waits for the sums."""
        sums = self.transport.begin_allreduce(np.array(mine, np.int64))
        return lambda: Facts(*sums.wait().tolist())

    def note(self, sums: Facts, predictable: bool) -> None:
        """Remember the sums of a step.

        Args:
            sums: The sums.
            predictable: Whether a step may begin before its own sums are known.

        Raises:
            RuntimeError: Some ranks have added gradients to the result of the exchange before, and others have not.
        """
        ranks, facts = self.transport.size, sums._replace(unsafe=0, replaced=0)
        if facts.resuming not in (0, ranks):
            raise RuntimeError(
                f"rank {self.transport.rank}: {facts.resuming} of {ranks} ranks have added gradients to exchanged ones "
                "that no step has applied, and the others have not: do the same on all ranks"
            )
        if not sums.unsafe:
            self.stable = predictable and facts == self.facts and facts.elements > 0 and not facts.resuming
            self.facts = facts

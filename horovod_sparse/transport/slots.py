"""Slots: space of equal size for all ranks' messages, so that an allgather takes one round of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# The bytes that slots of one size waste must take less time than the round of messages that they save: bytes in all,
# or a share of the messages.
_WASTE_BYTES, _WASTE = 1 << 13, 0.05
_LONGEST = 1 << 20
_CALLS = 8  # whose lengths make the next likely


class Slots:
    """Space for the messages of an allgather whose lengths change little from call to call.

    All ranks create the object together and use it in the same calls, so its size is the same on all of them.

    Attributes:
        size: Bytes reserved for each rank's message; 0 before the first call.
    """

    def __init__(self) -> None:
        self.size = 0
        self._recent: deque[Sequence[int]] = deque(maxlen=_CALLS)  # lengths in the last calls

    def adapt(self, lengths: Sequence[int]) -> None:
        """Choose the size for the next call, given the lengths of all ranks' messages in this call.

        It is sufficient if lengths vary as in the last calls, and never wasteful.
        """
        self._recent.append(lengths)
        longest, shortest = max(map(max, self._recent)), min(map(min, self._recent))
        # Lengths that have varied will vary further.
        size = longest + (max((longest - shortest) // 2, longest // 64 + 64) if longest > shortest else 0)
        waste = size * len(lengths) - sum(lengths)
        fits = longest <= _LONGEST and waste <= max(_WASTE_BYTES, _WASTE * sum(lengths))
        self.size = size if fits else 0

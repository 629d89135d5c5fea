"""Slots: space of equal size for all ranks' messages, so that an allgather takes one round of messages."""

from __future__ import annotations

from collections.abc import Sequence

# The bytes that slots of one size waste must take less time than the round of messages that they save.
_LONGEST = 1 << 20
_SPREAD = 1.05
_MARGIN, _MARGIN_BYTES = 1.02, 64


class Slots:
    """Space for the messages of an allgather whose lengths change little from call to call.

    All ranks create the object together and use it in the same calls, so its size is the same on all of them.

    Attributes:
        size: Bytes reserved for each rank's message; 0 before the first call.
    """

    def __init__(self) -> None:
        self.size = 0
        self._lengths: Sequence[int] = ()  # in the last call

    def adapt(self, lengths: Sequence[int]) -> None:
        """Choose the size for the next call: sufficient if lengths change by little, and never wasteful.

        Args:
            lengths: Lengths of all ranks' messages in this call.
        """
        longest = max(lengths)
        stable = lengths == self._lengths if self._lengths else longest == min(lengths)
        self._lengths = lengths
        if longest > _LONGEST or longest * len(lengths) > _SPREAD * sum(lengths):
            self.size = 0
        elif stable:
            self.size = longest
        else:
            self.size = int(_MARGIN * longest) + _MARGIN_BYTES

"""Schedule of local steps: which fragment of the model is exchanged after which step, and when it is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from horovod_sparse.rules.options import is_number


@dataclass(frozen=True)
class Schedule:
    """Settings of the exchange of fragments; must be the same on every rank.

    Args:
        fragments: Number of fragments F. In a round of H steps, fragment f is exchanged after (f + 1) H / F of them.
        delay: Local steps that a rank takes between the start of a fragment's exchange and its application.
        alpha: Share of the common parameters in the parameters from which a rank continues.
    """

    fragments: int = 1
    delay: int = 0
    alpha: float = 1.0

    def check(self, local_steps: int) -> None:
        """Raise ValueError if a setting is out of range for the number of steps of a round."""
        if type(self.fragments) is not int or not 1 <= self.fragments <= local_steps:
            raise ValueError(
                f"fragments must be an integer from 1 to local_steps={local_steps}, not {self.fragments!r}: "
                "a round exchanges at most one fragment after each step"
            )
        if type(self.delay) is not int or not 0 <= self.delay < local_steps:
            raise ValueError(
                f"delay must be an integer from 0 to local_steps - 1 = {local_steps - 1}, not {self.delay!r}: "
                "a fragment must be applied before its next exchange begins"
            )
        if not (is_number(self.alpha) and 0 < self.alpha <= 1):
            raise ValueError(
                f"alpha must be a number in (0, 1], not {self.alpha!r}: 1 takes the common parameters over"
            )

    @property
    def needs_synchronize(self) -> bool:
        """True if the ranks' parameters are equal only after ``synchronize()``."""
        return self.fragments > 1 or self.keeps_own

    @property
    def keeps_own(self) -> bool:
        """True if a fragment that was applied still differs between ranks."""
        return self.delay > 0 or self.alpha < 1

    def due(self, step: int, local_steps: int) -> int:
        """Return how many fragments must have begun their exchange after some steps of a round."""
        ends = ((f + 1) * local_steps // self.fragments for f in range(self.fragments))
        return sum(max(1, end) <= step for end in ends)

    def assign(self, sizes: Sequence[int]) -> list[int]:
        """Return the fragment of each parameter, for consecutive fragments of about the same number of elements."""
        total = max(1, sum(sizes))
        ends = accumulate(sizes)
        return [self.fragments * (2 * end - size) // (2 * total) for end, size in zip(ends, sizes, strict=True)]

"""Modes of a step: what it sends."""

from __future__ import annotations

from enum import Enum


class Mode(Enum):
    """Content of a step. Everything but ``ALL`` has error feedback."""

    SELECT = "select"
    ALL = "all"
    ALL_ROUNDED = "all rounded"
    SIGNS = "signs"  # of everything, times a scale for each block

    @classmethod
    def of_all(cls, wire: str | None) -> Mode:
        """Return the mode in which everything is sent in a wire format; None: in the bucket's dtype."""
        return cls.ALL if wire is None else cls.SIGNS if wire == "sign" else cls.ALL_ROUNDED

    @property
    def plain(self) -> bool:
        """True if everything is sent with more than its sign: a memory then sends gradients, not velocities."""
        return self in (Mode.ALL, Mode.ALL_ROUNDED)

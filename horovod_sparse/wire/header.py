"""The first bytes of every message: what is in it, checked on arrival."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

# The last character is the version of the format.
MAGIC = b"HVS1"
_LAYOUT = struct.Struct("<4sBBBxIIII")
HEADER_BYTES = _LAYOUT.size


class Positions(IntEnum):
    """Kinds of positions in messages."""

    PLAIN = 0  # int32 each
    CODED = 1  # gaps, behind the first
    RANGE = 2  # all from the first on


class Header(NamedTuple):
    """Content of a message.

    Attributes:
        kind: Number of the values' format.
        positions: How positions are told.
        bits: Low bits of a coded gap.
        count: Number of entries.
        first: The first position; 0 where all are told.
        levels: What the values' format needs to be told.
    """

    kind: int
    positions: Positions
    bits: int
    count: int  # type: ignore[assignment]  # a tuple's own count() is not what anybody wants here
    first: int
    levels: tuple[int, int]

    def pack(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(MAGIC, self.kind, self.positions, self.bits, self.count, self.first, *self.levels)

    @classmethod
    def unpack(cls, message: bytes, kind: int) -> Header:
        """The header of a message.

        Args:
            message: Its first bytes.
            kind: Number of the values' format that is expected.

        Raises:
            ValueError: It is no message, of another version, or its values are in another format.
        """
        if len(message) < HEADER_BYTES:
            raise ValueError(f"a message has {len(message)} bytes, fewer than the {HEADER_BYTES} of a header")
        magic, found, positions, bits, count, first, top, shift = _LAYOUT.unpack_from(message)
        if magic != MAGIC:
            raise ValueError(
                f"a message begins with {magic!r}, not {MAGIC!r}: use the same version of horovod_sparse on all ranks"
            )
        if found != kind:
            raise ValueError(f"a message has values of kind {found}, not {kind}: use the same settings on all ranks")
        if positions not in tuple(Positions):
            raise ValueError(f"a message has positions of the unknown kind {positions}")
        return cls(found, Positions(positions), bits, count, first, (top, shift))

"""Header of every message: describes the content, and is checked by the receiver."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

# The last character is the version of the format.
MAGIC = b"HVS1"
_LAYOUT = struct.Struct("<4sBBBxIIII")
HEADER_BYTES = _LAYOUT.size


class Positions(IntEnum):
    """Encodings of positions in messages."""

    PLAIN = 0  # one int32 per position
    CODED = 1  # coded gaps; the header holds the first position
    RANGE = 2  # consecutive; the header holds the first position


class Header(NamedTuple):
    """Description of a message's content.

    Attributes:
        kind: Number of the values' format.
        positions: Encoding of the positions.
        bits: Number of low bits of a coded gap; otherwise 0.
        count: Number of entries.
        first: First position of coded positions and ranges; otherwise 0.
        levels: Parameters of the values' format, ``top`` and ``shift``; (0, 0) for formats without levels.
    """

    kind: int
    positions: Positions
    bits: int
    count: int  # type: ignore[assignment]  # hides tuple.count()
    first: int
    levels: tuple[int, int]

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _LAYOUT.pack(MAGIC, self.kind, self.positions, self.bits, self.count, self.first, *self.levels)

    @classmethod
    def unpack(cls, message: bytes, kind: int) -> Header:
        """Unpack the header of a message.

        Args:
            message: First HEADER_BYTES bytes of the message, or more.
            kind: Expected number of the values' format.

        Raises:
            ValueError: The bytes are not a header, or the message has another version or format of values.
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
            raise ValueError(f"a message has positions of unknown kind {positions}")
        return cls(found, Positions(positions), bits, count, first, (top, shift))

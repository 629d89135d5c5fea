"""Messages of entries: a header, the values and their positions; docs/wire.md specifies every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.kernels import joined, kernels_for, to_device, to_host
from horovod_sparse.kernels.types import MAX_SIZE, Array, Indices
from horovod_sparse.wire.header import HEADER_BYTES, Header, Positions
from horovod_sparse.wire.values import Absent, Exact, format_for

# Indices, ascending, and the values at these positions.
Entries: TypeAlias = tuple[Indices, Array]

# Value of ``coded_from`` that disables coding: no message has this number of entries.
NEVER = MAX_SIZE + 1

_ALIGNMENT = 8


@dataclass(frozen=True)
class Wire:
    """Encoder and decoder of messages of entries, which are uint8 arrays.

    Attributes:
        format: Format of the values.
        coded_from: Minimum number of entries for which a message's indices are coded.
    """

    format: Exact
    coded_from: int = NEVER

    @classmethod
    def of(cls, name: str | None, own: np.dtype[Any], coded_from: int = NEVER) -> Wire:
        """Return a wire with a format from DENSE_FORMATS; None: values of the dtype ``own`` are sent as they are."""
        return cls(format_for(name, own), coded_from)

    @property
    def exact(self) -> Wire:
        """The same wire for values that are sent without conversion."""
        return replace(self, format=Exact(self.format.own))

    def round(self, values: Array) -> tuple[Array, Array | None, Wire]:
        """Split values into values that the format represents and the rounding errors, which sum exactly to the values.

        Returns:
            The rounded values; the errors, None if nothing is rounded; the wire that packs the rounded values, or some
            of them, without further rounding.
        """
        rounded, error, format_ = self.format.round(values)
        return rounded, error, replace(self, format=format_)

    def pack(self, entries: Entries) -> Array:
        """Pack entries into a message; exact for values that ``round`` returned together with this wire."""
        indices, values = entries
        if not values.size or values.size < self.coded_from:
            return self._join(values, Positions.PLAIN, 0, 0, indices.view(np.uint8))
        bits, coded = kernels_for(values).encode_indices(indices)
        return self._join(values, Positions.CODED, bits, int(indices[0]), coded)

    def pack_indices(self, indices: Indices) -> Array:
        """Pack positions without values into a message."""
        return replace(self, format=Absent()).pack((indices, indices))

    def pack_all(self, values: Array, first: int) -> Array:
        """Pack values of consecutive positions that begin at ``first`` into a message."""
        return self._join(values, Positions.RANGE, 0, first, None)

    def nbytes_all(self, count: int) -> int:
        """Return the length in bytes of a ``pack_all`` message with ``count`` values."""
        return -(-(HEADER_BYTES + self.format.nbytes(count)) // _ALIGNMENT) * _ALIGNMENT

    def _join(self, values: Array, positions: Positions, bits: int, first: int, coded: Array | None) -> Array:
        header = Header(self.format.kind, positions, bits, values.size, first, self.format.levels)
        end = HEADER_BYTES + self.format.nbytes(values.size)
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        message = np.empty_like(values, dtype=np.uint8, shape=(begin + (0 if coded is None else coded.size),))
        message[:HEADER_BYTES] = to_device(np.frombuffer(header.pack(), np.uint8), values)
        message[HEADER_BYTES:end] = self.format.write(values)
        message[end:begin] = 0
        if coded is not None:
            message[begin:] = coded
        return message

    def unpack(self, message: Array, end: int) -> Entries:
        """Unpack one message; see ``unpack_all``."""
        return self.unpack_all([message], end)[0]

    def unpack_all(self, messages: Sequence[Array], end: int) -> list[Entries]:
        """Unpack messages into entries, as views where possible.

        On a device, this synchronizes once for all headers, once for all plain indices, and once per coded message.

        Args:
            messages: Outputs of ``pack`` or ``pack_all`` of wires with the same kind of format, at least one; aligned
                to 8 bytes.
            end: Exclusive upper bound of the positions.

        Raises:
            ValueError: A message is damaged, or has another version or format.
        """
        entries, plain = [], []
        for header, message in zip(self._headers(messages), messages, strict=True):
            values, rest = self._read_values(header, message)
            indices = _read_positions(header, rest, end)
            entries.append((indices, values))
            if header.positions is Positions.PLAIN and header.count:
                plain.append(indices)
        if plain:
            kernels_for(plain[0]).check_ascending(plain, end)
        return entries

    def unpack_indices(self, messages: Sequence[Array], end: int) -> list[Indices]:
        """Unpack the positions of ``pack_indices`` messages, as ``unpack_all``."""
        return [indices for indices, _ in replace(self, format=Absent()).unpack_all(messages, end)]

    def unpack_values(self, messages: Sequence[Array]) -> list[Array]:
        """Unpack the values of ``pack_all`` messages, as ``unpack_all``."""
        headers = self._headers(messages)
        return [self._read_values(header, message)[0] for header, message in zip(headers, messages, strict=True)]

    def _headers(self, messages: Sequence[Array]) -> list[Header]:
        starts = to_host(joined([message[:HEADER_BYTES] for message in messages])).tobytes()
        # If a message is shorter than a header, at least the last one read here is incomplete.
        begins = range(0, HEADER_BYTES * len(messages), HEADER_BYTES)
        return [Header.unpack(starts[begin : begin + HEADER_BYTES], self.format.kind) for begin in begins]

    def _read_values(self, header: Header, message: Array) -> tuple[Array, Array]:
        """Return the values of a message, and the bytes of its positions."""
        format_, last = self.format, HEADER_BYTES + self.format.nbytes(header.count)
        if header.levels != format_.levels:
            format_ = format_.described(header.levels)
        begin = -(-last // _ALIGNMENT) * _ALIGNMENT
        if message.size < begin:
            raise ValueError(f"a message of {message.size} bytes is too short for {header.count} values")
        return format_.read(message[HEADER_BYTES:last], header.count), message[begin:]


def _read_positions(header: Header, part: Array, end: int) -> Indices:
    """Return the positions from the last part of a message."""
    if header.positions is Positions.CODED:
        return kernels_for(part).decode_indices(part, header.count, header.first, header.bits, end)
    expected = 4 * header.count if header.positions is Positions.PLAIN else 0
    if part.size != expected or header.bits:
        raise ValueError(f"a message of {header.count} entries has {part.size} bytes of positions, not {expected}")
    if header.positions is Positions.PLAIN:
        return part.view(np.int32)
    if header.first + header.count > end:
        raise ValueError(f"a message has {header.count} positions from {header.first} on, but the vector has {end}")
    return np.arange(header.first, header.first + header.count, dtype=np.int32, like=part)


def concatenate(parts: Sequence[Entries]) -> Entries:
    """Concatenate entries of ascending, disjoint ranges of positions."""
    return joined([indices for indices, _ in parts]), joined([values for _, values in parts])

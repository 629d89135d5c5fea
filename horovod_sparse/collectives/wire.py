"""The format in which entries travel, and what rounding the values to it takes away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.formats import FORMATS, NAMES
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.vector import SparseVector

# Indices and values of some positions, ascending.
Entries: TypeAlias = tuple[Indices, Array]

_INDEX_BYTES = 4
_KNOWN = ("float32", "float16", "bfloat16")


class Wire:
    """Rounds values to a format, and writes and reads messages (uint8 arrays) in it.

    Only values that ``round`` has been at survive the way: writing a message rounds, too, but tells nobody what is
    lost.

    Args:
        name: "float32", "float16" or "bfloat16"; None: values travel as they are.

    Raises:
        ValueError: The name is unknown.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None and name not in _KNOWN:
            raise ValueError(f"unknown wire format {name!r}; known are: {', '.join(_KNOWN)}")
        self._format = None if name is None else FORMATS[name]

    def dtype(self, own: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which values of a dtype travel: never a wider one."""
        return own if self._format is None or self._format.itemsize >= own.itemsize else self._format

    def entry(self, own: np.dtype[Any]) -> int:
        """Bytes of an entry, index and value, on the wire."""
        return _INDEX_BYTES + self.dtype(own).itemsize

    def round(self, vector: SparseVector) -> tuple[SparseVector, SparseVector]:
        """Parts a vector into one that survives the way and the rounding error; their sum is exactly the vector.

        Values beyond the format's largest saturate at it. The few for which even the rest would have to be rounded,
        from some 2**29 on in float32 with a float16 wire, stay behind whole. Infinity and NaN travel as they are.

        Args:
            vector: float32 or float64; one without indices is not rounded.

        Returns:
            The rounded vector, of the same indices and dtype, and the errors that are not zero.
        """
        values, dtype = vector.values, self.dtype(vector.values.dtype)
        if vector.indices is None or dtype == values.dtype:
            return vector, vector.nothing()
        rounded, error = kernels_for(values).round_values(values, NAMES[dtype])
        lost = np.flatnonzero(error)
        return replace(vector, values=rounded), SparseVector(vector.indices[lost], error[lost], vector.size)

    def write(self, values: Array) -> Array:
        """Values as a message; a view where they travel in their own dtype."""
        message: Array = kernels_for(values).narrow(values, NAMES[self.dtype(values.dtype)])
        return message

    def read(self, message: Array, own: np.dtype[Any]) -> Array:
        """The values of a message in a dtype of one's own; a view where they travelled in it."""
        values: Array = kernels_for(message).widen(message, NAMES[self.dtype(own)], own)
        return values

    def pack(self, entries: Entries) -> Array:
        """Values and indices in one message: half the latency of two.

        Values come first, so that the wide ones are aligned wherever the message begins at a multiple of 8 bytes. An
        entry costs 6 bytes (16 bits on the wire), 8 (float32) or 12 (float64).
        """
        indices, values = entries
        dtype = self.dtype(values.dtype)
        end = values.size * dtype.itemsize
        message = np.empty_like(values, dtype=np.uint8, shape=(end + indices.nbytes,))
        kernels_for(values).narrow(values, NAMES[dtype], out=message[:end])
        message[end:] = indices.view(np.uint8)
        return message

    def unpack(self, message: Array, own: np.dtype[Any]) -> Entries:
        """The entries of a packed message; views where nothing has to be converted.

        Args:
            message: Begins at a multiple of 8 bytes.
            own: Dtype of the values.
        """
        end = message.size // self.entry(own) * self.dtype(own).itemsize
        values, indices = self.read(message[:end], own), message[end:]
        # Behind an odd number of 16-bit values, indices are not where int32 may be.
        return (indices.copy() if end % _INDEX_BYTES else indices).view(np.int32), values


def concatenate(parts: Sequence[Entries]) -> Entries:
    """Joins entries of ascending, disjoint ranges of positions."""
    return np.concatenate([indices for indices, _ in parts]), np.concatenate([values for _, values in parts])

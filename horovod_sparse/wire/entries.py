"""Messages of entries: values first, then their indices; and what rounding the values takes away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.formats import FORMATS as DTYPES
from horovod_sparse.kernels.types import Array, Indices

# Indices and values of some positions, ascending.
Entries: TypeAlias = tuple[Indices, Array]

# In which values of vectors with indices may travel.
FORMATS = ("float32", "float16", "bfloat16")

_INDEX_BYTES = 4


class Exact:
    """Writes and reads messages (uint8 arrays) in which values travel as they are: nothing is converted.

    Values come first, so that they are aligned wherever the message begins at a multiple of 8 bytes, and what arrived
    can be used where it lies.

    Args:
        own: Dtype of the values, float32 or float64.

    Attributes:
        dtype: In which they travel.
        entry: Bytes of an entry, index and value.
    """

    def __init__(self, own: np.dtype[Any]) -> None:
        self.dtype = own
        self.entry = _INDEX_BYTES + own.itemsize

    def round(self, values: Array) -> tuple[Array, Array | None]:
        """The values themselves; nothing is lost."""
        return values, None

    def write(self, values: Array) -> Array:
        """Values as a message: a view."""
        message: Array = values.view(np.uint8)
        return message

    def read(self, message: Array) -> Array:
        """The values of a message: a view."""
        values: Array = message.view(self.dtype)
        return values

    def pack(self, entries: Entries) -> Array:
        """Values and indices in one message: half the latency of two."""
        indices, values = entries
        end = values.size * self.dtype.itemsize
        message = np.empty_like(values, dtype=np.uint8, shape=(end + indices.nbytes,))
        message[:end] = self.write(values)
        message[end:] = indices.view(np.uint8)
        return message

    def unpack(self, message: Array) -> Entries:
        """The entries of a packed message, which begins at a multiple of 8 bytes; views where that is possible."""
        end = message.size // self.entry * self.dtype.itemsize
        # Behind an odd number of 16-bit values, indices are not where int32 may be.
        indices = message[end:].copy() if end % _INDEX_BYTES else message[end:]
        return indices.view(np.int32), self.read(message[:end])


class Rounded(Exact):
    """Rounds values to a narrower format, and writes and reads messages in it.

    Only values that ``round`` has been at survive the way: writing a message rounds, too, but tells nobody what is
    lost.

    Args:
        own: Dtype of the values, float32 or float64.
        name: One of FORMATS, narrower than the values.
    """

    def __init__(self, own: np.dtype[Any], name: str) -> None:
        super().__init__(DTYPES[name])
        self._own, self._name = own, name

    def round(self, values: Array) -> tuple[Array, Array | None]:
        """Parts values into those that survive the way and the rounding errors; their sums are exactly the values.

        Values beyond the format's largest saturate at it. The few for which even the rest would have to be rounded,
        from some 2**29 on in float32 with a float16 wire, stay behind whole. Infinity and NaN travel as they are.
        """
        rounded, error = kernels_for(values).round_values(values, self._name)
        return rounded, error

    def write(self, values: Array) -> Array:
        """Values as a message, rounded."""
        message: Array = kernels_for(values).narrow(values, self._name)
        return message

    def read(self, message: Array) -> Array:
        """The values of a message, in their own dtype."""
        values: Array = kernels_for(message).widen(message, self._name, self._own)
        return values


def wire_for(name: str | None, own: np.dtype[Any]) -> Exact:
    """The format of a name; values never travel in a wider one than their own.

    Args:
        name: One of FORMATS; None: values travel as they are.
        own: Dtype of the values, float32 or float64.
    """
    narrower = name is not None and DTYPES[name].itemsize < own.itemsize
    return Rounded(own, name) if name is not None and narrower else Exact(own)


def concatenate(parts: Sequence[Entries]) -> Entries:
    """Joins entries of ascending, disjoint ranges of positions."""
    return np.concatenate([indices for indices, _ in parts]), np.concatenate([values for _, values in parts])

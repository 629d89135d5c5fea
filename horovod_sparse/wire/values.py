"""Wire formats of values, and the rounding errors of conversions to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.formats import FORMATS as DTYPES
from horovod_sparse.kernels.types import Array

# Formats for the values of vectors with indices.
FORMATS = ("float32", "float16", "bfloat16", "log8", "log4", "fitted3", "fitted2")
# Formats for the values of vectors without indices.
DENSE_FORMATS = (*FORMATS, "sign")
# Numbers of the formats in messages; "none" is that of messages without values.
KINDS = {
    name: number
    for number, name in enumerate(
        ("float64", "float32", "float16", "bfloat16", "log8", "log4", "none", "sign", "fitted3", "fitted2"), start=1
    )
}

_INFINITE = 0x7F800000  # bits of infinity in float32
_LEAST_SHIFT = 16
# Of the fit of levels: magnitudes that it sees, and rounds, after which levels hardly move.
_SAMPLES, _ROUNDS = 4096, 20


class Exact:
    """Format that stores values without conversion, and without a copy where possible.

    Attributes:
        own: Dtype of the values, float32 or float64.
        kind: Number of the format in messages.
        width: Bytes per value.
        levels: Parameters of the format in a message's header, ``top`` and ``shift``; (0, 0) if it has none.
        block: Vectors that were rounded together may be divided at multiples of this number of values.
    """

    rounds = False
    block = 1

    def __init__(self, own: np.dtype[Any]) -> None:
        self.own = own
        self.kind = KINDS[own.name]
        self.width: float = own.itemsize
        self.levels = (0, 0)

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` values."""
        return int(count * self.width)

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Split values into rounded values and rounding errors, which sum exactly to the values.

        Returns:
            The rounded values; the errors, None if nothing is rounded; the format that represents the rounded values.
        """
        return values, None, self

    def write(self, values: Array) -> Array:
        """Return the values as bytes (uint8)."""
        return values.view(np.uint8)

    def read(self, part: Array, count: int) -> Array:
        """Return the values stored in bytes."""
        del count
        return part.view(self.own)

    def described(self, levels: tuple[int, int]) -> Exact:
        """Return the format of a message with these levels in its header; raise ValueError if they are invalid."""
        if levels != (0, 0):
            raise ValueError(f"a message has levels {levels}, but its format has none")
        return self


class Absent(Exact):
    """Format of messages that hold positions without values."""

    def __init__(self) -> None:
        self.own, self.kind, self.width, self.levels = np.dtype(np.uint8), KINDS["none"], 0, (0, 0)

    def write(self, values: Array) -> Array:
        """Return no bytes."""
        return values.view(np.uint8)[:0]


class Narrow(Exact):
    """Format that rounds values to a narrower floating-point dtype.

    Call ``round`` before ``write``: ``write`` rounds, too, but does not return the errors. ``Kernels.round_values``
    describes the rounding.

    Args:
        own: Dtype of the values, float32 or float64.
        name: Name of the format, which is narrower than ``own``.
    """

    rounds = True

    def __init__(self, own: np.dtype[Any], name: str) -> None:
        super().__init__(own)
        self.kind, self.width, self._name = KINDS[name], DTYPES[name].itemsize, name

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Split values into the nearest values of the format and the errors."""
        return *kernels_for(values).round_values(values, self._name), self

    def write(self, values: Array) -> Array:
        """Return the rounded values as bytes."""
        return kernels_for(values).narrow(values, self._name)

    def read(self, part: Array, count: int) -> Array:
        """Return the stored values in the dtype ``own``."""
        del count
        return kernels_for(part).widen(part, self._name, self.own)


class Logarithmic(Exact):
    """Format that rounds values to logarithmic levels, in codes of 8 or 4 bits including the sign.

    The levels reach from the largest magnitude down to the smallest. ``round`` chooses the levels for each vector and
    returns the format with these levels; messages contain them. Levels are floating-point numbers with up to 7 bits
    after the leading one. The wider the range of magnitudes, the fewer bits remain: at least 3 in log8, which covers
    15 octaves, and 0 in log4, which covers 6. Smaller magnitudes may become zero. Infinity and NaN both arrive as NaN.

    Args:
        own: Dtype of the values, float32 or float64.
        name: "log8" or "log4".
        levels: Largest level and shift, ``top`` and ``shift`` of ``kernels.cpu.round_levels``.
    """

    rounds = True

    def __init__(self, own: np.dtype[Any], name: str, levels: tuple[int, int] = (0, _LEAST_SHIFT)) -> None:
        super().__init__(own)
        self._name, self._bits = name, int(name.removeprefix("log"))
        self._most_shift = 20 if self._bits == 8 else 23
        self.kind, self.width, self.levels = KINDS[name], self._bits / 8, levels

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` codes, rounded up."""
        return (count * self._bits + 7) // 8

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Split values into levels between the smallest and the largest magnitude, and the errors."""
        kernels = kernels_for(values)
        levels = self._choose(*kernels.key_range(values))
        rounded, error = kernels.round_levels(values, self._bits, *levels)
        return rounded, error, Logarithmic(self.own, self._name, levels)

    def _choose(self, low: int, high: int) -> tuple[int, int]:
        """Return the finest levels that cover the range of magnitudes, or the coarsest ones if none do."""
        steps = (1 << (self._bits - 1)) - 2
        for shift in range(_LEAST_SHIFT, self._most_shift + 1):
            top = min(-(-high >> shift), (_INFINITE >> shift) - 1) << shift
            if top - (steps << shift) <= low:
                break
        return top, shift

    def write(self, values: Array) -> Array:
        """Return the values as codes."""
        return kernels_for(values).encode_levels(values, self._bits, *self.levels)

    def read(self, part: Array, count: int) -> Array:
        """Return the values of the codes."""
        return kernels_for(part).decode_levels(part, count, self._bits, *self.levels, self.own)

    def described(self, levels: tuple[int, int]) -> Exact:
        """Return the same format with the levels of a message; raise ValueError if they are invalid."""
        top, shift = levels
        if top >= _INFINITE or not _LEAST_SHIFT <= shift <= self._most_shift or top % (1 << shift):
            raise ValueError(f"a message has levels {levels}, which are invalid in {self._name}")
        return Logarithmic(self.own, self._name, levels)


class Sign(Exact):
    """Format that rounds values to their signs, times the mean magnitude of their block of 256 values.

    Of all scales, the mean leaves the smallest error, which is never longer than the vector (Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019). Unlike in the other formats, an error is the rounded difference of value and
    rounded value.

    Args:
        own: Dtype of the values and scales, float32 or float64.
    """

    rounds = True
    block = 256

    def __init__(self, own: np.dtype[Any]) -> None:
        super().__init__(own)
        self.kind, self.width = KINDS["sign"], 1 / 8 + own.itemsize / self.block

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of the scales and signs of ``count`` values."""
        return -(-count // self.block) * self.own.itemsize + (count + 7) // 8

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Split values into signed scales and errors."""
        full = values.size // self.block * self.block
        scales = np.empty_like(values, shape=(-(-values.size // self.block),))
        scales[: full // self.block] = np.abs(values[:full]).reshape(-1, self.block).sum(axis=1) / self.block
        if full < values.size:
            scales[-1] = np.abs(values[full:]).sum() / (values.size - full)
        rounded = np.copysign(self._spread(scales, values.size), values)
        return rounded, values - rounded, self

    def _spread(self, scales: Array, count: int) -> Array:
        return scales.repeat(self.block)[:count]

    def write(self, values: Array) -> Array:
        """Return the scales of the blocks, and then the sign bits."""
        scales = np.abs(values[:: self.block])
        return np.concatenate([scales.view(np.uint8), np.packbits(np.signbit(values), bitorder="little")])

    def read(self, part: Array, count: int) -> Array:
        """Return the signed scales."""
        end = -(-count // self.block) * self.own.itemsize
        negative = np.unpackbits(part[end:], bitorder="little")[:count].view(np.bool_)
        scales = self._spread(part[:end].view(self.own), count)
        return np.where(negative, -scales, scales)


class Fitted(Exact):
    """Format that rounds values to levels that fit their magnitudes, in codes of 3 or 2 bits including the sign.

    The magnitudes of a vector are divided into 4 or 2 cells by Lloyd's algorithm (Lloyd 1982, Max 1960), and each is
    rounded to the mean of its cell, so that the error is always shorter than the vector: of n values in a cell with
    the mean c, n c^2 of the squared norm arrives. Messages contain the levels. Unlike in the other formats, an error is
    the rounded difference of value and rounded value.

    Args:
        own: Dtype of the values and levels, float32 or float64.
        name: "fitted3" or "fitted2".
        table: Levels of the rounded values, ascending; None before values are rounded.
    """

    rounds = True

    def __init__(self, own: np.dtype[Any], name: str, table: Array | None = None) -> None:
        super().__init__(own)
        self._name, self._bits, self._table = name, int(name.removeprefix("fitted")), table
        self._cells = 1 << (self._bits - 1)
        self.kind, self.width = KINDS[name], self._bits / 8

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of the levels and codes of ``count`` values."""
        return self._cells * self.own.itemsize + (count * self._bits + 7) // 8 if count else 0

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Split values into levels and errors."""
        if not values.size:
            return values, values, self
        magnitudes = np.abs(values)
        sample = np.sort(to_host(magnitudes[:: -(-values.size // _SAMPLES)]))
        bounds = to_device(_fit(sample.astype(np.float64), self._cells).astype(self.own), values)
        cells, table = self._cells_of(magnitudes, bounds), np.zeros_like(values, shape=(self._cells,))
        for cell in range(self._cells):
            inside = cells == cell
            table[cell] = (magnitudes * inside).sum() / np.maximum(inside.sum(), 1)
        rounded = np.copysign(table[cells], values)
        return rounded, values - rounded, Fitted(self.own, self._name, np.sort(table))

    def _cells_of(self, magnitudes: Array, bounds: Array) -> Array:
        """Return the cell of each magnitude, uint8; a bound belongs to the cell above it."""
        cells = np.zeros_like(magnitudes, dtype=np.uint8)
        for bound in bounds:
            cells += magnitudes >= bound
        return cells

    def write(self, values: Array) -> Array:
        """Return the levels, and then the codes."""
        if self._table is None or not values.size:
            return values.view(np.uint8)[:0]
        codes = self._cells_of(np.abs(values), self._table[1:]) | np.signbit(values) * np.uint8(self._cells)
        bits = np.empty_like(codes, shape=(values.size, self._bits))
        for place in range(self._bits):
            bits[:, place] = codes >> place & 1
        return np.concatenate([self._table.view(np.uint8), np.packbits(bits.ravel(), bitorder="little")])

    def read(self, part: Array, count: int) -> Array:
        """Return the values of the codes."""
        if not count:
            return part.view(self.own)
        end = self._cells * self.own.itemsize
        bits = np.unpackbits(part[end:], bitorder="little")[: count * self._bits].reshape(count, self._bits)
        codes = np.zeros_like(part, shape=(count,))
        for place in range(self._bits):
            codes |= bits[:, place] << place
        levels = part[:end].view(self.own)
        values: Array = np.concatenate([levels, -levels])[codes]
        return values


def _fit(ascending: Array, cells: int) -> Array:
    """Return the boundaries between cells of ascending magnitudes, float64, by Lloyd's algorithm."""
    sums = np.concatenate([[0.0], np.cumsum(ascending)])
    ends = np.linspace(0, ascending.size, cells + 1).round().astype(np.int64)
    for _ in range(_ROUNDS):
        means = np.diff(sums[ends]) / np.maximum(np.diff(ends), 1)
        ends[1:-1] = np.searchsorted(ascending, (means[1:] + means[:-1]) / 2)
    bounds: Array = ascending[np.minimum(ends[1:-1], ascending.size - 1)]
    return bounds


def format_for(name: str | None, own: np.dtype[Any]) -> Exact:
    """Return the format for a name; ``Exact`` if a floating-point format would not be narrower than the values.

    Args:
        name: Name from DENSE_FORMATS; None: values are sent without conversion.
        own: Dtype of the values, float32 or float64.
    """
    if name == "sign":
        return Sign(own)
    if name is not None and name.startswith("fitted"):
        return Fitted(own, name)
    if name is not None and name.startswith("log"):
        return Logarithmic(own, name)
    narrower = name is not None and DTYPES[name].itemsize < own.itemsize
    return Narrow(own, name) if name is not None and narrower else Exact(own)

"""Formats in which values travel, and what rounding to them takes away."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.formats import FORMATS as DTYPES
from horovod_sparse.kernels.types import Array

# In which values of vectors with indices may travel.
FORMATS = ("float32", "float16", "bfloat16", "log8", "log4")
# Their numbers in messages.
KINDS = {name: number for number, name in enumerate(("float64", *FORMATS), start=1)}

_INFINITE = 0x7F800000  # the bits of a float32
_LEAST_SHIFT = 16


class Exact:
    """Writes and reads values as they are: nothing is converted, and where possible nothing is copied.

    Args:
        own: Dtype of the values, float32 or float64.

    Attributes:
        own: It.
        kind: Number of the format in messages.
        width: Bytes of a value.
        levels: What a message's header says of the format: two numbers, 0 where there is nothing to say.
    """

    rounds = False

    def __init__(self, own: np.dtype[Any]) -> None:
        self.own = own
        self.kind = KINDS[own.name]
        self.width: float = own.itemsize
        self.levels = (0, 0)

    def nbytes(self, count: int) -> int:
        """Bytes of so many values."""
        return int(count * self.width)

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Parts values into those that survive the way and the rounding errors; their sums are exactly the values.

        Returns:
            The values that survive; the errors, None where nothing is rounded; the format that holds these values.
        """
        return values, None, self

    def write(self, values: Array) -> Array:
        """Values as bytes (uint8)."""
        written: Array = values.view(np.uint8)
        return written

    def read(self, part: Array, count: int) -> Array:
        """Values out of their bytes."""
        del count
        values: Array = part.view(self.own)
        return values

    def described(self, levels: tuple[int, int]) -> Exact:
        """The format of a message whose header says this.

        Raises:
            ValueError: No such message is written.
        """
        if levels != (0, 0):
            raise ValueError(f"a message in a format without levels says {levels} of them")
        return self


class Narrow(Exact):
    """Rounds values to a narrower floating-point format.

    Only values that ``round`` has been at survive the way: writing a message rounds, too, but tells nobody what is
    lost. Values beyond the format's largest saturate at it. The few for which even the rest would have to be rounded,
    from some 2**29 on in float32 with float16, stay behind whole. Infinity and NaN travel as they are.

    Args:
        own: Dtype of the values, float32 or float64.
        name: Of the format, which is narrower than the values.
    """

    rounds = True

    def __init__(self, own: np.dtype[Any], name: str) -> None:
        super().__init__(own)
        self.kind, self.width, self._name = KINDS[name], DTYPES[name].itemsize, name

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Parts values into the nearest of the format and the errors."""
        return *kernels_for(values).round_values(values, self._name), self

    def write(self, values: Array) -> Array:
        """Values as bytes, rounded."""
        written: Array = kernels_for(values).narrow(values, self._name)
        return written

    def read(self, part: Array, count: int) -> Array:
        """The values, in their own dtype."""
        del count
        values: Array = kernels_for(part).widen(part, self._name, self.own)
        return values


class Logarithmic(Exact):
    """Rounds values to logarithmic levels between the largest magnitude and the smallest, of 8 or 4 bits with sign.

    Each vector that is rounded has levels of its own, which its messages tell: ``round`` gives the format that has
    them. Levels are floating-point numbers, with as many of 7 bits behind the leading one as the range of the
    magnitudes leaves, but at least 3 with 8 bits and none with 4: 15 and 6 octaves. What is smaller may become zero.
    What is not finite arrives as NaN.

    Args:
        own: Dtype of the values, float32 or float64.
        name: "log8" or "log4".
        levels: The largest level and the shift, as ``kernels.cpu.round_levels`` takes them.
    """

    rounds = True

    def __init__(self, own: np.dtype[Any], name: str, levels: tuple[int, int] = (0, _LEAST_SHIFT)) -> None:
        super().__init__(own)
        self._name, self._bits = name, int(name.removeprefix("log"))
        self._most_shift = 20 if self._bits == 8 else 23
        self.kind, self.width, self.levels = KINDS[name], self._bits / 8, levels

    def nbytes(self, count: int) -> int:
        """Bytes of so many codes, whole ones."""
        return (count * self._bits + 7) // 8

    def round(self, values: Array) -> tuple[Array, Array | None, Exact]:
        """Parts values into the levels between the smallest and the largest magnitude, and the errors."""
        kernels = kernels_for(values)
        levels = self._choose(*kernels.key_range(values))
        rounded, error = kernels.round_levels(values, self._bits, *levels)
        return rounded, error, Logarithmic(self.own, self._name, levels)

    def _choose(self, low: int, high: int) -> tuple[int, int]:
        """The finest levels that reach from the lowest to the highest magnitude, or as far down as they go."""
        steps = (1 << (self._bits - 1)) - 2
        for shift in range(_LEAST_SHIFT, self._most_shift + 1):
            top = min(-(-high >> shift), (_INFINITE >> shift) - 1) << shift
            if top - (steps << shift) <= low:
                break
        return top, shift

    def write(self, values: Array) -> Array:
        """Values as codes."""
        codes: Array = kernels_for(values).encode_levels(values, self._bits, *self.levels)
        return codes

    def read(self, part: Array, count: int) -> Array:
        """The values of the codes."""
        values: Array = kernels_for(part).decode_levels(part, count, self._bits, *self.levels, self.own)
        return values

    def described(self, levels: tuple[int, int]) -> Exact:
        """The same format with the levels of a message."""
        top, shift = levels
        if top >= _INFINITE or not _LEAST_SHIFT <= shift <= self._most_shift or top % (1 << shift):
            raise ValueError(f"a message says levels {levels}, which none in {self._name} has")
        return Logarithmic(self.own, self._name, levels)


def format_for(name: str | None, own: np.dtype[Any]) -> Exact:
    """The format of a name; values never travel in a wider one than their own.

    Args:
        name: One of FORMATS; None: values travel as they are.
        own: Dtype of the values, float32 or float64.
    """
    if name is not None and name.startswith("log"):
        return Logarithmic(own, name)
    narrower = name is not None and DTYPES[name].itemsize < own.itemsize
    return Narrow(own, name) if name is not None and narrower else Exact(own)

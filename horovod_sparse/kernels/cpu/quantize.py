"""Stochastic quantization."""

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array


def quantize(buffer: Array, bits: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round every element at random to one of its two adjacent levels, so that the mean is the element.

    This is QSGD (Alistarh et al., NeurIPS 2017) with the largest magnitude of each block of 256 elements as its norm.
    With ``L = 2**(bits - 1) - 1``, the levels of a block are the multiples ``-L .. L`` of its unit. The unit is the
    largest magnitude / L, rounded up to 16 significant bits, so that every level is a float32. The variance of an
    element is at most ``unit**2 / 4``, its bias at most ``2**-24`` units. Elements on a level are unchanged.

    A block of zeros has unit 0. A block that contains infinity or NaN, or whose unit exceeds float32, has unit NaN, and
    ``dequantize`` sets all of it to NaN. Any other unit is at least 2**-126.

    Args:
        buffer: float32 or float64 [n].
        bits: Bits per code, 4 or 8.
        seed: 0 .. 2**63 - 1. The random number of an element depends only on the seed and the position. Use a new seed
            for each call; otherwise the errors accumulate.

    Returns:
        The codes, multiples stored as 0 .. 2 L, uint8 [n], and the units, float32 [ceil(n / 256)]. Codes of 4 bits are
        packed two per byte, [ceil(n / 2)]: byte i of a block of m elements holds the codes of elements i (lower half)
        and i + ceil(m / 2).
    """
    return _cpu.quantize(buffer, bits, seed)


def dequantize(
    codes: NDArray[np.uint8],
    units: NDArray[np.float32],
    buffer: Array,
    bits: int,
    scale: float = 1.0,
    *,
    add: bool = False,
) -> None:
    """Set ``buffer <- scale * values``, with the values to which ``quantize`` rounded its buffer.

    Args:
        codes: Codes from ``quantize``, for a buffer of the same length.
        units: Units from ``quantize``.
        buffer: Overwritten, float32 or float64 [n].
        bits: Bits per code, 4 or 8.
        scale: Finite factor. ``scale * unit`` is rounded to the buffer's dtype, then its product with each multiple.
        add: Add to the buffer instead of overwriting it.
    """
    _cpu.dequantize(codes, units, buffer, bits, scale, add)

"""Stochastic quantization."""

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array


def quantize(buffer: Array, bits: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round every element at random to one of the two levels next to it, so that its mean is the element.

    As QSGD (Alistarh et al., NeurIPS 2017), with a norm for each block of 256 elements: its largest magnitude. With
    ``L = 2**(bits - 1) - 1``, the levels of a block are the multiples ``-L .. L`` of its unit, which is the largest
    magnitude / L, rounded up to 16 significant bits, so that every level is a float32. The variance of an element is
    at most ``unit**2 / 4``, its bias at most ``2**-24`` units. Elements on a level stay as they are.

    A block of zeros has unit 0. A block with an infinity or a NaN, or whose unit exceeds float32, has unit NaN:
    dequantize makes all of it NaN. The least unit of others is 2**-126.

    Args:
        buffer: float32 or float64 [n].
        bits: Of a code, 4 or 8.
        seed: 0 .. 2**63 - 1. What is drawn for an element depends on it and the position only; take another seed each
            time, or the errors add up.

    Returns:
        The codes, multiples stored as 0 .. 2 L, uint8 [n]; with 4 bits two per byte, [ceil(n / 2)], where byte i of a
        block of m elements holds those of its elements i (lower half) and i + ceil(m / 2). The units, float32
        [ceil(n / 256)].
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
    """Set ``buffer <- scale *`` what quantize rounded its buffer to.

    Args:
        codes: From quantize, of a buffer of the same length.
        units: From quantize.
        buffer: Overwritten, float32 or float64 [n].
        bits: As for quantize.
        scale: Finite; its product with a block's unit is rounded to the buffer's dtype, then that with the multiples.
        add: Add to the buffer instead of overwriting it.
    """
    _cpu.dequantize(codes, units, buffer, bits, scale, add)

"""Bits per coded index, compared with the entropy of a position, and speed of the coder.

    python -m benchmarks.kernels.coding -n 25e6 --repeat 15

Positions are random, with densities of 0.1, 1 and 10 %. Speeds are those of the fastest repetition, on one core. The
column `stream` is the memory bound: half the time of a copy of the indices and the code, as a copy reads and writes.
"""

from __future__ import annotations

import math
from timeit import repeat as times_of

import numpy as np

from benchmarks import command_line
from horovod_sparse.kernels import cpu

_DENSITIES = (0.001, 0.01, 0.1)


def entropy(density: float) -> float:
    """Return the entropy of random positions, in bits per selected position."""
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


def row(size: int, density: float, repeat: int) -> str:
    """Return the table row of one density at the current SIMD level."""
    indices = np.flatnonzero(np.random.default_rng(1).random(size, np.float32) < density).astype(np.int32)
    count, first = indices.size, int(indices[0])
    bits, coded = cpu.encode_indices(indices)
    per_index, least = 8 * coded.size / count, entropy(count / size)
    encode = min(times_of(lambda: cpu.encode_indices(indices), number=1, repeat=repeat))
    decode = min(times_of(lambda: cpu.decode_indices(coded, count, first, bits, size), number=1, repeat=repeat))
    stream = np.zeros(indices.nbytes + coded.nbytes, np.uint8)
    copy = min(times_of(stream.copy, number=1, repeat=repeat)) / 2  # a copy reads and writes all bytes
    speeds = "".join(f"{count / seconds / 1e6:12.0f}" for seconds in (encode, decode, copy))
    return f"{density:8.3f}{least:10.3f}{per_index:10.3f}{per_index / least:8.3f}{speeds}"


def main() -> None:
    """Print a table for the best SIMD level of this machine and for portable code."""
    parser = command_line("kernels.coding", __doc__)
    parser.add_argument("-n", type=float, default=25e6, help="positions (default: 25e6)")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions, of which the fastest counts (default: 15)")
    options = parser.parse_args()
    best = cpu.simd_level()
    for level in dict.fromkeys((best, "portable")):
        cpu.use_simd(level)
        print(f"\n{level}, {options.n:.0f} positions; million indices/s")
        print(f"{'density':>8}{'entropy':>10}{'bits':>10}{'ratio':>8}{'encode':>12}{'decode':>12}{'stream':>12}")
        for density in _DENSITIES:
            print(row(int(options.n), density, options.repeat), flush=True)


if __name__ == "__main__":
    main()

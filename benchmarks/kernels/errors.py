"""Times of the kernels that compress residuals (count sketch, stochastic quantization), compared with a memory bound.

    python -m benchmarks.kernels.errors --size 25M --ratios 0.1,0.4 --rows 1,3 --bits 4,8 --turns 9

The bound of a kernel is the time of simple loops that read each input and write each output once, in sequence. It runs
in every turn, next to the kernel. The smallest times are compared. Everything runs on one thread.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from timeit import timeit

import numpy as np

from benchmarks import command_line
from benchmarks.runner import Column, Found, Turns, add_arguments, choose, column, run, table, values
from horovod_sparse.cli.units import at_least, count, listed
from horovod_sparse.kernels import cpu
from horovod_sparse.kernels.types import Array

# Target: at most this multiple of the bound.
TARGET = 3.0


@dataclass(frozen=True)
class Contender:
    """Kernel, and the arrays that it reads, adds to and overwrites."""

    name: str
    run: Callable[[], object]
    reads: Sequence[Array]
    changes: Sequence[Array] = ()
    writes: Sequence[Array] = ()

    def measure(self) -> dict[str, float]:
        """Return the milliseconds of the kernel and of its bound."""
        return {"ms": 1e3 * timeit(self.run, number=1), "bound": 1e3 * timeit(self.bound, number=1)}

    def bound(self) -> None:
        """Read and write the same memory with simple loops."""
        for array in self.reads:
            cpu.largest([(0, array)])
        for array in self.changes:
            np.add(array, 1, out=array)
        for array in self.writes:
            array.fill(1)


def sketching(gradient: Array, buffer: Array, ratio: float, rows: int) -> list[Contender]:
    """Return the contenders of the count sketch: adding to it, updating it, and querying it."""
    sketch = np.zeros(cpu.sketch_length(len(gradient), ratio, rows), np.float32)

    def update(carried: float) -> Callable[[], None]:
        return lambda: cpu.sketch_update(sketch, gradient, delivered, rows, 1, carried)

    # One percent of the positions, in contiguous blocks.
    delivered = np.flatnonzero(np.arange(len(gradient)) % 25_600 < 256).astype(np.int32)
    label = f"ratio {ratio:g} rows {rows}"
    return [
        Contender(f"add {label}", update(0.0), [gradient], changes=[sketch]),
        Contender(f"update {label}", update(1e-6), [gradient], changes=[sketch]),
        Contender(f"query {label}", lambda: cpu.sketch_query(sketch, buffer, rows, 1), [sketch], writes=[buffer]),
    ]


def quantizing(gradient: Array, buffer: Array, bits: int) -> list[Contender]:
    """Return the contenders of quantization, which allocates its codes, and of dequantization."""
    codes, units = cpu.quantize(gradient, bits, 1)
    words = np.zeros(len(codes) // 4, np.float32)
    quantize, dequantize = f"quantize bits {bits}", f"dequantize bits {bits}"
    return [
        Contender(quantize, lambda: cpu.quantize(gradient, bits, 1), [gradient], writes=[words]),
        Contender(dequantize, lambda: cpu.dequantize(codes, units, buffer, bits), [words], writes=[buffer]),
    ]


def show(found: Found) -> str:
    """Return the table, with a note where the target is missed."""

    def ratio(turns: Turns) -> float:
        return float(min(values(turns, "ms")) / min(values(turns, "bound")))

    columns: dict[str, Column] = {
        "min ms": column("ms", of=min),
        "bound ms": column("bound", of=min),
        "ratio": lambda turns: f"{ratio(turns):.2f}",
        "": lambda turns: "" if ratio(turns) <= TARGET else f"above {TARGET:g}",
    }
    return table("", found, columns)


def main() -> None:
    """Measure and print."""
    parser = command_line("kernels.errors", __doc__)
    add_arguments(parser, (), turns=7)
    parser.add_argument("--size", type=count, default="25M")
    parser.add_argument("--ratios", type=listed(float), default="0.1,0.4")
    parser.add_argument("--rows", type=listed(at_least(1)), default="1,3")
    parser.add_argument("--bits", type=listed(at_least(1)), default="4,8")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(options.size, dtype=np.float32)
    buffer = np.zeros_like(gradient)
    contenders = []
    for ratio, rows in itertools.product(options.ratios, options.rows):
        contenders += sketching(gradient, buffer, ratio, rows)
    for bits in options.bits:
        contenders += quantizing(gradient, buffer, bits)
    by_name = {contender.name: contender for contender in contenders}
    choose(parser, options, by_name)
    print(f"simd {cpu.simd_level()}   load average {os.getloadavg()[0]:.2f}")
    for contender in contenders:
        contender.measure()  # touches memory for the first time
    run(options, [{"size": options.size}], lambda **_: nullcontext(lambda name: by_name[name].measure()), show)


if __name__ == "__main__":
    main()

"""Times of compression in two levels, compared with direct compression, as in GraVAC's publication.

    python -m benchmarks.kernels.levels --sizes 25M --factors 100,1000 --turns 5

The levels are the k largest entries at the lowest factor (10), and the largest of these at a higher factor. `direct`
selects the entries of the higher factor only. `both` selects those of both factors, each from the complete vector.
`levels` selects those of both factors in two levels. All three run with exact selection through an Accumulator, as in
training (`ours`), and with torch.topk on precomputed magnitudes. The ratios are those of the smallest times.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from timeit import timeit
from typing import Any

import torch

from benchmarks import command_line
from benchmarks.kernels.selection import CpuInput, machine
from benchmarks.runner import Found, Record, Turns, add_arguments, choose, column, run, table, values
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.cli.units import count, listed

LOWEST = 10  # compression factor


class Levels:
    """Contenders on one vector; ``factor`` is the higher compression factor."""

    def __init__(self, size: int, factor: int) -> None:
        self._given = CpuInput(size, 1 / LOWEST, 1)
        self._magnitudes = torch.from_numpy(abs(self._given.initial + self._given.gradient))
        self._many, self._few = self._given.k, max(1, size // factor)

    def _ours(self) -> dict[str, Callable[[Accumulator], Any]]:
        """Return the selections from an accumulator, by name."""
        many, few = self._many, self._few

        def both(accumulator: Accumulator) -> None:
            accumulator.put_back(accumulator.take_largest(many))
            accumulator.take_largest(few)

        return {
            "direct": lambda accumulator: accumulator.take_largest(few),
            "both": both,
            "levels": lambda accumulator: accumulator.take_largest(many).cut(few),
        }

    def _sorting(self) -> dict[str, Callable[[Accumulator], Any]]:
        """Return the same selections with torch.topk, by name."""
        values, many, few = self._magnitudes, self._many, self._few
        return {
            "direct": lambda _: values.topk(few, sorted=False),
            "both": lambda _: (values.topk(many, sorted=False), values.topk(few, sorted=False)),
            "levels": lambda _: values.topk(many, sorted=False).values.topk(few, sorted=False),
        }

    def measure(self, contender: str) -> Record:
        """Return the milliseconds of one selection."""
        by, _, name = contender.partition(" ")
        select = {"ours": self._ours, "torch.topk": self._sorting}[by]()[name]
        self._given.reset()
        accumulator = Accumulator(self._given.buffer, [(0, self._given.gradient)])
        return {"ms": 1e3 * timeit(lambda: select(accumulator), number=1)}


def show(found: Found) -> str:
    """Return the table of a cell; ratios are those to `levels` by the same selection."""

    def ratio(turns: Turns) -> str:
        levels = f"{turns[0]['contender'].partition(' ')[0]} levels"
        return f"{min(values(turns, 'ms')) / min(values(found[levels], 'ms')):.2f}" if levels in found else ""

    return table("", found, {"min ms": column("ms", ".1f", min), "/ levels": ratio})


def main() -> None:
    """Measure and print."""
    parser = command_line("kernels.levels", __doc__)
    add_arguments(parser, (), turns=5)
    parser.add_argument("--sizes", type=listed(count), default="25M")
    parser.add_argument("--factors", type=listed(int), default="100,1000")
    options = parser.parse_args()
    names = itertools.product(("ours", "torch.topk"), ("direct", "both", "levels"))
    choose(parser, options, map(" ".join, names))
    torch.set_num_threads(1)
    print("   ".join(f"{name}: {value}" for name, value in machine().items()))
    pairs = itertools.product(options.sizes, options.factors)
    cells = [{"size": size, "factor": factor} for size, factor in pairs]
    run(options, cells, lambda **cell: nullcontext(Levels(**cell).measure), show)
    print(f"load average at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()

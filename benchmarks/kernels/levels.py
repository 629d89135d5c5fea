"""Times of compression in two levels, compared with direct compression, as in GraVAC's publication.

    python -m benchmarks.kernels.levels --sizes 25M --factors 100,1000 --rounds 5

The levels are the k largest entries at the lowest factor (10), and the largest of these at a higher factor. `direct`
selects the entries of the higher factor only. `both` selects those of both factors, each from the complete vector.
`levels` selects those of both factors in two levels. All three run with exact selection through an Accumulator, as in
training, and with torch.topk on precomputed magnitudes. The ratios are those of the smallest times.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from timeit import timeit
from typing import Any

import torch

from benchmarks import command_line, interleaved
from benchmarks.kernels.selection import CpuInput, machine
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.cli.units import count, listed

LOWEST = 10  # compression factor


class Levels:
    """Contenders on one vector; ``factor`` is the higher compression factor."""

    def __init__(self, size: int, factor: int) -> None:
        self._given = CpuInput(size, 1 / LOWEST, 1)
        self._magnitudes = torch.from_numpy(abs(self._given.initial + self._given.gradient))
        self._many, self._few = self._given.k, max(1, size // factor)

    def ours(self) -> dict[str, Callable[[Accumulator], Any]]:
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

    def sorting(self) -> dict[str, Callable[[Accumulator], Any]]:
        """Return the same selections with torch.topk, by name."""
        values, many, few = self._magnitudes, self._many, self._few
        return {
            "direct": lambda _: values.topk(few, sorted=False),
            "both": lambda _: (values.topk(many, sorted=False), values.topk(few, sorted=False)),
            "levels": lambda _: values.topk(many, sorted=False).values.topk(few, sorted=False),
        }

    def measure(self, ways: Mapping[str, Callable[[Accumulator], Any]], rounds: int) -> dict[str, float]:
        """Return the smallest milliseconds of each selection over interleaved rounds."""

        def milliseconds(way: Callable[[Accumulator], Any]) -> float:
            self._given.reset()
            accumulator = Accumulator(self._given.buffer, [(0, self._given.gradient)])
            return 1e3 * timeit(lambda: way(accumulator), number=1)

        return {name: min(found) for name, found in interleaved(ways.items(), milliseconds, rounds).items()}


def main() -> None:
    """Measure and print."""
    parser = command_line("kernels.levels", __doc__)
    parser.add_argument("--sizes", type=listed(count), default="25M")
    parser.add_argument("--factors", type=listed(int), default="100,1000")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("   ".join(f"{name}: {value}" for name, value in machine().items()))
    print(
        f"{'n':>12}{'factor':>8}{'by':>12}{'direct':>10}{'both':>10}{'levels':>10}{'both/levels':>13}{'direct/levels':>15}"
    )
    for size, factor in itertools.product(options.sizes, options.factors):
        levels = Levels(size, factor)
        for name, ways in (("ours", levels.ours()), ("torch.topk", levels.sorting())):
            ms = levels.measure(ways, options.rounds)
            print(
                f"{size:12,}{factor:8}{name:>12}{ms['direct']:10.1f}{ms['both']:10.1f}{ms['levels']:10.1f}"
                f"{ms['both'] / ms['levels']:13.2f}{ms['direct'] / ms['levels']:15.2f}",
                flush=True,
            )
    print(f"load average at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()

"""Times of every sparsifier, compared with a memory bound and with torch.topk.

    python -m benchmarks.kernels.sparsifiers --sizes 25M --densities 0.01 --turns 5
    python -m benchmarks.kernels.sparsifiers --sizes 25M --ranks 8,64

All contenders have the same input (normally distributed gradients and residuals). Each takes its entries through an
Accumulator, as in training. `stream` is the bound: read gradient, read and write buffer; it runs three times in a turn,
as other load affects it most. `torch.topk` is the selection alone, from precomputed magnitudes.

With `--ranks`, rules that divide the selection among the ranks also run as one of that many ranks, with its part of the
bucket and k/P entries, without messages.

Results are verified: the entries taken and the remaining buffer add up to gradient + buffer exactly, and the number of
entries is what the rule promises. The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from timeit import timeit
from typing import Any

import numpy as np
import torch

from benchmarks import command_line
from benchmarks.kernels.selection import CpuInput, machine, moved_wrongly
from benchmarks.runner import Found, Record, add_arguments, choose, column, run, table, times
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.cli.units import count, listed
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from horovod_sparse.vector import SparseVector

_NEVER = 10**9
_STREAM, _TOPK = "stream", "torch.topk"
# Options of the contenders. Rules that choose positions only in some steps have done so before they are timed; "stable,
# refresh" chooses in every step, which shows the cost of a choice.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SPARSIFIERS if name not in ("threshold", "stable")},
    "reusedtopk": ("reusedtopk", {"tau_threshold": _NEVER}),
    "randomk, own": ("randomk", {"shared": False}),
    "threshold": ("threshold", {}),
    "stable": ("stable", {"refresh": _NEVER}),
    "stable, refresh": ("stable", {"refresh": 1}),
}
# Rules that divide the selection among the ranks.
DIVIDED = ("micro", "exdyna", "deft")
# Promised numbers of entries for such gradients, as multiples of k; redsync's bisection may end anywhere.
PROMISED = {
    "chunked": (0.99, 1.01),  # rounded for each chunk
    "reusedtopk": (2 / 3, 4 / 3),
    "gaussiank": (2 / 3, 4 / 3),
    "dgc": (0.8, 1.0),
    "redsync": (0.0, np.inf),
    "sidco": (1.0, 1.5),
    "arctopk": (0.0, 1.0),  # complete blocks of 1024
}


class Case:
    """Input and contenders of one size and density."""

    def __init__(self, size: int, density: float, threads: int, ranks: Sequence[int] = ()) -> None:
        self.given = CpuInput(size, density, threads)
        self._numbers = itertools.count()
        self._verified: dict[str, tuple[int, float]] = {}
        self.sparsifiers = {label: self._build(*contender) for label, contender in CONTENDERS.items()}
        self._ranks = {divided(name, size): size for size in ranks for name in DIVIDED}
        self.sparsifiers |= {divided(name, size): self._build(name, {}, size) for size in ranks for name in DIVIDED}

    def _build(self, name: str, options: dict[str, Any], ranks: int = 1) -> Sparsifier:
        context = BucketContext(self.given.buffer.size, self.given.buffer[:0], ranks=ranks)
        if name == "threshold":  # the threshold that selects k entries
            magnitudes = np.abs(self.given.initial + self.given.gradient)
            options = {"threshold": float(np.partition(magnitudes, -self.given.k)[-self.given.k])}
        rule: Any = SPARSIFIERS[name]
        sparsifier: Sparsifier = rule(context, rule.Options.read({**options, "threads": self.given.threads}))
        return sparsifier

    def reset(self) -> Accumulator:
        """Return the accumulator at the start of a step."""
        self.given.reset()
        return Accumulator(self.given.buffer, [(0, self.given.gradient)])

    def take(self, label: str, accumulator: Accumulator) -> SparseVector:
        """Run one contender's step."""
        return self.sparsifiers[label].take(accumulator, self.given.k, Step(number=next(self._numbers)))

    def wrong(self, label: str) -> tuple[int, float]:
        """Return the number of mistakes after a contender's step, and its number of entries as a multiple of k."""
        vector = self.take(label, self.reset())
        mistakes = moved_wrongly(self.given.initial + self.given.gradient, self.given.buffer, *vector.entries)
        least, most = PROMISED.get(label, (1.0, 1.0))
        if label in self._ranks:  # the first part has exactly its share, which rounds
            least, most = (bound / self._ranks[label] + sign / self.given.k for bound, sign in ((0.8, -1), (1.2, 1)))
        if label.startswith("stable"):  # selects complete blocks of 64
            least = 1 - 63 / self.given.k
        count = len(vector) / self.given.k
        return mistakes + int(not least <= count <= most), count

    def measure(self, label: str) -> Record:
        """Return the milliseconds of a contender's step, its number of entries as a multiple of k, and its mistakes."""
        if label == _STREAM:
            return {"ms": [self._milliseconds(lambda accumulator: accumulator.settle()) for _ in range(3)]}
        if label == _TOPK:
            return {"ms": [self._milliseconds(lambda _: self.given.topk())]}
        if label not in self._verified:
            self._verified[label] = self.wrong(label)
        wrong, count = self._verified[label]
        ms = self._milliseconds(lambda accumulator: self.take(label, accumulator))
        return {"ms": [ms], "entries": count, "wrong": wrong}

    def _milliseconds(self, run: Callable[[Accumulator], Any]) -> float:
        accumulator = self.reset()
        return 1e3 * timeit(lambda: run(accumulator), number=1)


def divided(name: str, ranks: int) -> str:
    """Return the label of a rule on one of several ranks."""
    return f"{name}, P={ranks}"


def show(found: Found) -> str:
    """Return the table of a cell."""
    verified = {name: [{"entries": None, "wrong": None, **turn} for turn in turns] for name, turns in found.items()}
    more = {"entries / k": column("entries", ".3f"), "#wrong": column("wrong", "d", max)}
    return table("", verified, {**times(found, _STREAM), **more})


def main() -> int:
    """Measure and print; return 1 if a result was wrong."""
    parser = command_line("kernels.sparsifiers", __doc__)
    add_arguments(parser, (), turns=5)
    add = parser.add_argument
    add("--sizes", type=listed(count), default="25M")
    add("--densities", type=listed(float), default="0.01")
    add("--ranks", type=listed(count), default=(), help="of rules that divide the selection")
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    parts = [divided(name, size) for size in options.ranks for name in DIVIDED]
    choose(parser, options, [_STREAM, *CONTENDERS, *parts, _TOPK])
    torch.set_num_threads(options.threads)
    print("   ".join(f"{name}: {value}" for name, value in machine().items()))
    pairs = itertools.product(options.sizes, options.densities)
    cells = [{"size": size, "density": density, "threads": options.threads} for size, density in pairs]
    wrong = run(options, cells, lambda **cell: nullcontext(Case(**cell, ranks=options.ranks).measure), show)
    print(f"\nload average at the end: {os.getloadavg()}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Times of every sparsifier, compared with a memory bound and with torch.topk.

    python -m benchmarks.kernels.sparsifiers --sizes 25M --densities 0.01 --rounds 5
    python -m benchmarks.kernels.sparsifiers --sizes 25M --ranks 8,64

Every round runs every contender on the same input (normally distributed gradients and residuals), so that other load
on the machine affects all of them. Each takes its entries through an Accumulator, as in training. `stream` is the
bound: read gradient, read and write buffer. `torch.topk` is the selection alone, from precomputed magnitudes.

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
from timeit import timeit
from typing import Any

import numpy as np
import torch

from benchmarks import command_line, interleaved
from benchmarks.kernels.selection import CpuInput, machine, moved_wrongly
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.cli.units import count, listed
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from horovod_sparse.vector import SparseVector

_NEVER = 10**9
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

    def round(self) -> list[tuple[str, Callable[[Accumulator], Any]]]:
        """Return the contenders of one round, in order; the bound runs several times, as load affects it most."""
        takes = [(label, lambda accumulator, label=label: self.take(label, accumulator)) for label in self.sparsifiers]
        topk = ("torch.topk", lambda _: self.given.topk())
        return [("stream", lambda accumulator: accumulator.settle())] * 3 + takes + [topk]

    def milliseconds(self, run: Callable[[Accumulator], Any]) -> float:
        """Return the time of one contender's step."""
        accumulator = self.reset()
        return 1e3 * timeit(lambda: run(accumulator), number=1)


def divided(name: str, ranks: int) -> str:
    """Return the label of a rule on one of several ranks."""
    return f"{name}, P={ranks}"


def show(size: int, density: float, case: Case, rounds: int) -> bool:
    """Verify, measure and print one combination; return whether all results were right."""
    print(f"\nn = {size:,}   density {density:g}   threads {case.given.threads}")
    print(f"  {'':16}{'min ms':>10}{'median ms':>12}{'/ stream':>10}{'entries / k':>13}{'#wrong':>8}")
    verified = {label: case.wrong(label) for label in case.sparsifiers}
    times = interleaved(case.round(), case.milliseconds, rounds)
    stream = min(times["stream"])
    for name, ms in times.items():
        wrong, count = verified.get(name, (0, 1.0))
        ratio = min(ms) / stream
        print(f"  {name:16}{min(ms):10.3f}{np.median(ms):12.3f}{ratio:10.2f}{count:13.3f}{wrong:8d}")
    return not any(wrong for wrong, _ in verified.values())


def main() -> int:
    """Measure and print; return 1 if a result was wrong."""
    parser = command_line("kernels.sparsifiers", __doc__)
    parser.add_argument("--sizes", type=listed(count), default="25M")
    parser.add_argument("--densities", type=listed(float), default="0.01")
    parser.add_argument("--ranks", type=listed(count), default=(), help="of rules that divide the selection")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("   ".join(f"{name}: {value}" for name, value in machine().items()))
    right = [
        show(size, density, Case(size, density, options.threads, options.ranks), options.rounds)
        for size, density in itertools.product(options.sizes, options.densities)
    ]
    print(f"\nload average at the end: {os.getloadavg()}")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())

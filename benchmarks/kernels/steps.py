"""Times of a bucket's complete step, from the gradient to the dense result in place, compared with a memory bound.

    python -m benchmarks.kernels.steps --sizes 25M --densities 0.01 --threads 1,2 --rounds 9

Every round runs every contender on the same input, so that other load on the machine affects all of them:

- bound: read gradient, read and write residual, write gradient, 16 bytes per element, with the same kernels
- step: the pipeline of topka on one rank, which sends nothing: test for finite values, selection, dense result
- with scaler: the step as with a grad_scaler, which may restore the state before the step
- with momentum: the step with momentum before the selection; it also reads and writes the velocity: 24 bytes
- nesterov: the same with Nesterov's momentum

The last columns are the smallest times of the stages of the step; the rest of its time is Python. Results are verified:
old residual + gradient (after momentum, if any) equals new residual + result exactly. The exit status is 1 if a result
was wrong.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks import command_line, interleaved
from benchmarks.kernels.selection import machine
from horovod_sparse import metrics
from horovod_sparse.cli.units import at_least, count, listed
from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.kernels import cpu
from horovod_sparse.transport.mpi import MPITransport

PARTS = ("select", "agree", "exchange", "apply")
# Targets at 25M elements, 1 % and one thread: at most these multiples of the bound.
TARGETS = {"step": 1.7, "with scaler": 1.4}
_MOMENTUM = ",memory=momentum,momentum=0.9"
# Settings of the contenders.
SETTINGS = {
    "step": "",
    "with scaler": "",
    "with momentum": _MOMENTUM,
    "nesterov": f"{_MOMENTUM},nesterov=True",
}


class Case:
    """Input and contenders of one size, density and number of threads."""

    def __init__(self, size: int, density: float, threads: int) -> None:
        rng = np.random.default_rng(size)
        self.initial = rng.standard_normal(size, dtype=np.float32)
        self.gradient, self.buffer = self.initial.copy(), np.zeros_like(self.initial)
        self.threads = threads
        self.pipelines = {
            name: pipeline_for(
                parse(f"topka:density={density},threads={threads}{settings}"),
                *(size, self.gradient[:0], MPITransport(MPI.COMM_SELF)),
                undoable=name == "with scaler",
            )
            for name, settings in SETTINGS.items()
        }

    def run(self, name: str) -> list[float]:
        """Return one contender's milliseconds, followed by those of its stages."""
        np.copyto(self.gradient, self.initial)
        segments = [(0, self.gradient)]
        metrics.clear()
        begin = time.perf_counter()
        if name == "bound":
            cpu.accumulate(segments, self.buffer, 1.0, self.threads, clear=True)
        else:
            self.pipelines[name].run(segments, segments)
        seconds = time.perf_counter() - begin
        totals = metrics.totals()
        return [1e3 * seconds, *(1e3 * totals.get(part, 0.0) for part in PARTS)]

    def wrong(self, name: str) -> int:
        """Return the number of wrong elements after one more step of a pipeline."""
        before = self._memory(name)["residual"].copy()
        self.run(name)
        memory, momentum = self._memory(name), np.float32(0.9)
        added = memory.get("velocity", self.initial)
        if name == "nesterov":
            added = self.initial + momentum * added
        return int(np.count_nonzero(memory["residual"] + self.gradient != before + added))

    def _memory(self, name: str) -> Any:
        return self.pipelines[name].state_dict()["memory"]


def show(size: int, density: float, threads: int, rounds: int) -> bool:
    """Measure, verify and print one combination; return whether all results were right."""
    case = Case(size, density, threads)
    names = ["bound", *SETTINGS]
    for name in names:
        case.run(name)  # first touch of the memory
    times = interleaved(zip(names, names, strict=True), case.run, rounds)
    wrong = {name: case.wrong(name) for name in SETTINGS}
    print(f"\nn = {size:,}   density {density:g}   threads {threads}")
    heads = ("min ms", "median ms", "/ bound", "of medians", *PARTS)
    print(f"  {'':14}" + "".join(f"{head:>11}" for head in heads) + f"{'#wrong':>8}")
    bound = np.array(times["bound"])[:, 0]
    for name, (ms, *parts) in ((name, np.transpose(times[name])) for name in names):
        least, median = np.min(ms), np.median(ms)
        values = (least, median, least / np.min(bound), median / np.median(bound), *map(np.min, parts))
        print(f"  {name:14}" + "".join(f"{value:11.3f}" for value in values) + f"{wrong.get(name, 0):8d}")
    return not any(wrong.values())


def main() -> int:
    """Measure and print; return 1 if a result was wrong."""
    parser = command_line("kernels.steps", __doc__)
    parser.add_argument("--sizes", type=listed(count), default="25M")
    parser.add_argument("--densities", type=listed(float), default="0.01")
    parser.add_argument("--threads", type=listed(at_least(1)), default="1")
    parser.add_argument("--rounds", type=at_least(1), default=9)
    options = parser.parse_args()
    print("   ".join(f"{name}: {value}" for name, value in machine().items()))
    metrics.enable()
    grid = itertools.product(options.sizes, options.densities, options.threads)
    right = [show(*combination, options.rounds) for combination in grid]
    targets = ", ".join(f"{name} {target:g}" for name, target in TARGETS.items())
    print(f"\ntargets at 25M, 1 % and one thread: {targets}   load average at the end: {os.getloadavg()}")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())

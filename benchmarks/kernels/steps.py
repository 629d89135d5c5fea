"""Times of a bucket's complete step, from the gradient to the dense result in place, compared with a memory bound.

    python -m benchmarks.kernels.steps --sizes 25M --densities 0.01 --threads 1,2 --turns 9
    python -m benchmarks.kernels.steps --device cuda --sizes 25.6M,110M,336M --densities 0.001,0.01

All contenders have the same input:

- bound: read gradient, read and write residual, write gradient, 16 bytes per element, with the same kernels
- bound of 24: the same with momentum, which also reads and writes the velocity: 24 bytes per element
- step: the pipeline of topka on one rank, which sends nothing: test for finite values, selection, dense result
- with scaler: the step as with a grad_scaler, which may restore the state before the step
- with momentum: the step with momentum before the selection; its bound is that of 24 bytes
- nesterov: the same with Nesterov's momentum

GB/s counts the bytes of a contender's bound. The last columns are the smallest times of the stages of the step; the
rest of its time is Python. On a GPU, a time is the mean of consecutive steps, so that the host's work for a step hides
behind the one before it where it is shorter, and stages are the device's. Results are verified: old residual + gradient
(after momentum, if any) equals new residual + result exactly. The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import command_line, single_rank
from benchmarks.kernels.selection import cells, machine
from benchmarks.runner import (
    Column,
    Found,
    Measure,
    Record,
    Turns,
    add_arguments,
    choose,
    column,
    run,
    table,
    times,
    values,
)
from horovod_sparse import metrics
from horovod_sparse.cli.units import at_least, count, listed
from horovod_sparse.config import parse
from horovod_sparse.engine.device import device_of
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.kernels import kernels_for, to_host
from horovod_sparse.kernels.types import Velocity

PARTS = ("select", "agree", "exchange", "apply")
# Targets at 25M elements, 1 % and one thread of a CPU: at most these multiples of the bound.
TARGETS = {"step": 1.7, "with scaler": 1.4}
_FACTOR = 0.9
_MOMENTUM = f",memory=momentum,momentum={_FACTOR}"
# Settings of the contenders, and the bytes per element that each cannot avoid to move.
SETTINGS = {
    "step": "",
    "with scaler": "",
    "with momentum": _MOMENTUM,
    "nesterov": f"{_MOMENTUM},nesterov=True",
}
BYTES = {"bound": 16, "bound of 24": 24, "step": 16, "with scaler": 16, "with momentum": 24, "nesterov": 24}
# Consecutive steps on a GPU. A step's result is the next one's gradient, which makes it select the same entries again.
REPEAT = 20
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Case:
    """Input and contenders of one size, density and number of threads, on the stream used in training."""

    def __init__(
        self,
        size: int,
        density: float,
        threads: int,
        target: torch.device = CPU,
        contenders: Sequence[str] = tuple(SETTINGS),
    ) -> None:
        device = device_of(target)
        self._context = ExitStack()
        self._context.enter_context(device.work())
        self._initial = torch.randn(size, generator=torch.Generator(target).manual_seed(size), device=target)
        self._gradient = self._initial.clone()
        self.gradient = device.array_of(self._gradient)
        self.threads = threads
        self._buffer, self._velocity = (np.zeros_like(self.gradient) for _ in range(2))
        self._kernels = kernels_for(self.gradient)
        self._on_device = not isinstance(self.gradient, np.ndarray)
        self.pipelines = {
            name: pipeline_for(
                parse(f"topka:density={density},threads={threads}{SETTINGS[name]}"),
                *(size, self.gradient[:0], single_rank()),
                undoable=name == "with scaler",
            )
            for name in contenders
            if name in SETTINGS
        }

    def close(self) -> None:
        """Leave the context of the device."""
        self._context.close()

    def run(self, name: str, repeat: int = 0) -> list[float]:
        """Return one contender's milliseconds, followed by those of its stages."""
        repeat = repeat or (REPEAT if self._on_device else 1)
        self._gradient.copy_(self._initial)
        metrics.clear()
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(repeat):
            self._step(name)
        self._synchronize()
        seconds = time.perf_counter() - begin
        totals = metrics.totals()
        return [1e3 * one / repeat for one in (seconds, *(totals.get(part, 0.0) for part in PARTS))]

    def _step(self, name: str) -> None:
        segments = [(0, self.gradient)]
        if name in self.pipelines:
            self.pipelines[name].run(segments, segments)
            return
        velocity = Velocity(self._velocity, _FACTOR) if name == "bound of 24" else None
        self._kernels.accumulate(segments, self._buffer, 1.0, self.threads, clear=True, velocity=velocity)

    def _synchronize(self) -> None:
        if self._on_device:
            torch.cuda.synchronize()

    def wrong(self, name: str) -> int:
        """Return the number of wrong elements after one more step of a pipeline."""
        before = self._memory(name)["residual"].copy()
        self.run(name, repeat=1)
        memory, momentum, initial = self._memory(name), np.float32(_FACTOR), self._initial.cpu().numpy()
        added = memory.get("velocity", initial)
        if name == "nesterov":
            added = initial + momentum * added
        return int(np.count_nonzero(memory["residual"] + to_host(self.gradient) != before + added))

    def _memory(self, name: str) -> Any:
        memory = self.pipelines[name].state_dict()["memory"]
        return {key: to_host(memory[key]) for key in ("residual", "velocity") if key in memory}


@contextmanager
def open_cell(contenders: Sequence[str], size: int, density: float, threads: int, device: str) -> Iterator[Measure]:
    """Prepare a cell; a contender's results are verified when it has been measured for the first time."""
    case = Case(size, density, threads, GPU if device == "cuda" else CPU, contenders)
    facts, wrong = {"machine": machine(device)}, {name: 0 for name in contenders if name not in SETTINGS}

    def measure(name: str) -> Record:
        ms, *parts = case.run(name)
        if name not in wrong:
            wrong[name] = case.wrong(name)
        return {"ms": ms, **dict(zip(PARTS, parts, strict=True)), "wrong": wrong[name], **facts}

    for name in contenders:
        case.run(name, repeat=1)  # first touch of the memory
    try:
        yield measure
    finally:
        case.close()


def show(found: Found) -> str:
    """Return the table of a cell."""
    bound = np.median(values(found["bound"], "ms"))

    def rate(turns: Turns) -> str:
        first = turns[0]
        return f"{1e-6 * BYTES[first['contender']] * first['size'] / min(values(turns, 'ms')):.3f}"

    columns: dict[str, Column] = {
        **times(found, "bound"),
        "of medians": lambda turns: f"{np.median(values(turns, 'ms')) / bound:.2f}",
        "GB/s": rate,
        **{part: column(part, ".3f", min) for part in PARTS},
        "#wrong": column("wrong", "d", max),
    }
    return table("", found, columns)


def main() -> int:
    """Measure and print; return 1 if a result was wrong."""
    parser = command_line("kernels.steps", __doc__)
    add_arguments(parser, [*BYTES], turns=9)
    add = parser.add_argument
    add("--sizes", type=listed(count), default="25M")
    add("--densities", type=listed(float), default="0.01")
    add("--threads", type=listed(at_least(1)), default="1")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    choose(parser, options, BYTES)
    options.contenders = ["bound", *(name for name in options.contenders if name != "bound")]
    print("   ".join(f"{name}: {value}" for name, value in machine(options.device).items()))
    metrics.enable(device=torch.cuda if options.device == "cuda" else None)
    wrong = run(options, cells(options), partial(open_cell, options.contenders), show)
    if options.device == "cpu":
        targets = ", ".join(f"{name} {target:g}" for name, target in TARGETS.items())
        print(f"\ntargets at 25M, 1 % and one thread: {targets}")
    print(f"\nload average at the end: {os.getloadavg()}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

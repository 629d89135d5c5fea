"""Cost of statistics in a training step: counting them, asking for them, and taking norms.

    mpirun -np 2 python -m benchmarks.statistics_cost
    python -m benchmarks.statistics_cost --rounds 0        # of a bucket alone, in one process

First, what counting adds to the CPU time of a small bucket that exchanges with nobody: blocks of steps with and
without, in turns. Then a training: one model and one optimizer, a round is one step of each kind, in an order that
turns. Differences are taken within a pair or round, as the machine may be shared, and their median counts, with its
standard error.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import nn

import horovod_sparse as hvs
from horovod_sparse import metrics
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.base import PipelineBase
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.transport.mpi import MPITransport

Numbers: TypeAlias = NDArray[np.float64]
KINDS = ("nothing counted", "counted", "statistics()", "with norms")


def main() -> None:
    """Measures a bucket and a training."""
    options = _parse()
    hvd.init()
    if hvd.rank() == 0:
        without, more = bucket_seconds(options.compression)
        print(f"counting adds {middle(more)} us to the {1e6 * np.median(without):.0f} us of CPU of a step of a bucket")
    if options.rounds:
        train(options)


def bucket_seconds(compression: str, blocks: int = 24, steps: int = 300) -> tuple[Numbers, Numbers]:
    """CPU seconds of a step of a bucket of 1000 elements without counting, and by how much counting adds to them."""
    like = np.zeros(1000, np.float32)
    pipeline = pipeline_for(hvs.parse(compression), like.size, like, MPITransport(MPI.COMM_SELF))
    gradient = np.random.default_rng(0).standard_normal(like.size, np.float32)
    seconds = np.zeros((blocks, 2))
    for block in range(blocks):
        for counting in (block % 2, 1 - block % 2):
            with nullcontext() if counting else uncounted():
                start = time.process_time()
                for _ in range(steps):
                    pipeline.run([(0, gradient)], [(0, gradient)])
                seconds[block, counting] = (time.process_time() - start) / steps
    return seconds[:, 0], seconds[:, 1] - seconds[:, 0]


def train(options: argparse.Namespace) -> None:
    """Measures a training, and prints a table on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    optimizer = hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001),
        named_parameters=model.named_parameters(),
        compression=hvs.parse(options.compression),
    )
    images = torch.randn(options.batch, options.width)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    numbers = optimizer.statistics()
    buckets = {key.partition("/")[0] for key in numbers} - {"total"}
    seconds = measure(step, optimizer, options.rounds)
    call = call_seconds(optimizer, step)
    if hvd.rank() == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count:,} parameters in {len(buckets)} buckets, {options.compression}, {hvd.size()} ranks")
        print(f"{'':16} {'step in ms':>10} {'more, in us':>18} {'of a step':>10}")
        for kind, times in zip(KINDS, seconds, strict=True):
            print(row(kind, times, seconds[0]))
        print(f"statistics() alone takes {1e6 * call:.0f} us for {len(numbers)} numbers")


def measure(step: Callable[[], None], optimizer: Any, rounds: int) -> Numbers:
    """Seconds of a step on the slowest rank, [kinds, rounds]."""
    mine = torch.zeros(len(KINDS), rounds, dtype=torch.float64)
    for number in range(rounds):
        for place in range(len(KINDS)):
            kind = (number + place) % len(KINDS)
            around: AbstractContextManager[None] = uncounted() if kind == 0 else nullcontext()
            optimizer.statistics(norms=kind == 3)  # of the step that follows
            with around:
                hvd.barrier()
                start = time.perf_counter()
                step()
                if kind >= 2:
                    optimizer.statistics()
                mine[kind, number] = time.perf_counter() - start
    # With a name: the number that Horovod gives otherwise differs between ranks once some have joined.
    slowest: Numbers = hvd.allreduce(mine, op=hvd.Max, name="slowest").numpy()
    return slowest


def call_seconds(optimizer: Any, step: Callable[[], None]) -> float:
    """Median seconds of ``statistics()``, after a step each."""
    times = []
    for _ in range(50):
        step()
        start = time.perf_counter()
        optimizer.statistics()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@contextmanager
def uncounted() -> Iterator[None]:
    """Steps inside time no stage and count nothing."""

    def stage(pipeline: PipelineBase, name: str, **details: Any) -> AbstractContextManager[None]:
        del details
        pipeline.stage = name
        return metrics.NOTHING

    def nothing(*_: object) -> None:  # a mock of mock's own takes longer than what it replaces
        return

    with mock.patch.object(PipelineBase, "_stage", stage), mock.patch.object(Counts, "exchanged", nothing):
        yield


def row(kind: str, times: Numbers, without: Numbers) -> str:
    """A line of the table: the median step, and by how much a step is longer than one that counts nothing."""
    more = times - without
    share = f"{np.median(more) / np.median(without):.2%}" if more.any() else "-"
    return f"{kind:16} {1e3 * np.median(times):10.2f} {middle(more) if more.any() else '-':>18} {share:>10}"


def middle(seconds: Numbers) -> str:
    """The median in microseconds, with its standard error by the quartiles."""
    low, high = np.percentile(seconds, [25, 75])
    error = 1.2533 * (high - low) / 1.349 / math.sqrt(seconds.size)
    return f"{1e6 * np.median(seconds):.1f} +- {1e6 * error:.1f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of the training; 0: none")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--width", type=int, default=768, help="of each layer, which has width * (width + 1) parameters"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--compression", default="topka:density=0.01,bucket_bytes=4000000")
    return parser.parse_args()


if __name__ == "__main__":
    main()

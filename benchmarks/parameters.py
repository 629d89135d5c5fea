"""Step time of a model with many small parameters, compared with stock Horovod: the Python overhead per parameter.

    mpirun -np 2 python -m benchmarks.parameters

Each round creates, trains and discards one optimizer of each kind. The kinds alternate because the machine may be
shared. The time of a round is the median over its steps on the slowest rank. The table shows the fastest round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line, interleaved


def main() -> None:
    """Measure, and print a table in milliseconds on rank 0."""
    options = _parse()
    hvd.init()
    kinds: dict[str, Callable[..., Any]] = {"stock": hvd.DistributedOptimizer}
    for spec in options.compression:
        kinds[spec] = partial(hvs.DistributedOptimizer, compression=hvs.parse(spec))
    rounds = interleaved(kinds.items(), partial(_round, options), options.rounds)
    if hvd.rank() == 0:
        print(f"{options.parameters} parameters of {options.elements} elements, {hvd.size()} ranks; ms, best round")
        print(f"{'':30} {'construction':>14} {'full step':>12} {'step() alone':>14}")
        for name, results in rounds.items():
            made, full, alone = (min(times) for times in zip(*results, strict=True))
            print(f"{name:30} {made:14.1f} {full:12.1f} {alone:14.1f}")


def _round(options: argparse.Namespace, wrapper: Callable[..., Any]) -> tuple[float, ...]:
    """Return the milliseconds of construction, of a full step and of ``step()`` alone, each on the slowest rank."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(options.elements) for _ in range(options.parameters))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.barrier()
    start = time.perf_counter()
    optimizer = wrapper(plain, named_parameters=model.named_parameters())
    made = time.perf_counter() - start
    steps, alone = [], []
    for _ in range(options.steps):
        hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss: Any = torch.stack(list(model)).square().sum()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        steps.append(end - start)
        alone.append(end - backward)
    mine = torch.tensor([made, statistics.median(steps), statistics.median(alone)], dtype=torch.float64) * 1000
    return tuple(hvd.allreduce(mine, op=hvd.Max).tolist())


def _parse() -> argparse.Namespace:
    parser = command_line("parameters", __doc__)
    parser.add_argument("--parameters", type=int, default=2000, help="number of parameters")
    parser.add_argument("--elements", type=int, default=64, help="elements per parameter")
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each optimizer")
    parser.add_argument(
        "--compression",
        nargs="*",
        default=["topka:density=0.01", "topka:density=0.01,dense_below=0"],
        help="compressions to compare with stock Horovod; dense_below=0 also compresses small parameters",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

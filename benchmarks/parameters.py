"""Whole training steps of a model of many small parameters, beside stock Horovod: what one parameter costs in Python.

    mpirun -np 2 python -m benchmarks.parameters

Each round makes, trains and drops one optimizer of each kind, in turns, as the machine may be shared. Of a kind's steps
the median counts, on the slowest rank.
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


def main() -> None:
    """Measures, and prints a table of milliseconds on rank 0."""
    options = _parse()
    hvd.init()
    kinds: dict[str, Callable[..., Any]] = {"stock": hvd.DistributedOptimizer}
    for spec in options.compression:
        kinds[spec] = partial(hvs.DistributedOptimizer, compression=hvs.parse(spec))
    rounds = _in_turns(kinds, options)
    if hvd.rank() == 0:
        print(f"{options.parameters} parameters of {options.elements} elements, {hvd.size()} ranks; ms, best round")
        print(f"{'':30} {'construction':>14} {'whole step':>12} {'step() alone':>14}")
        for name, results in rounds.items():
            made, whole, alone = (min(times) for times in zip(*results, strict=True))
            print(f"{name:30} {made:14.1f} {whole:12.1f} {alone:14.1f}")


def _in_turns(kinds: dict[str, Callable[..., Any]], options: argparse.Namespace) -> dict[str, list[tuple[float, ...]]]:
    rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, wrapper in kinds.items():
            rounds[name].append(_round(wrapper, options))
    return rounds


def _round(wrapper: Callable[..., Any], options: argparse.Namespace) -> tuple[float, ...]:
    """Milliseconds for making the optimizer, for a step and for step() in it, each on the slowest rank."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--elements", type=int, default=64, help="of each parameter")
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--compression",
        nargs="*",
        default=["topka:density=0.01", "topka:density=0.01,dense_below=0"],
        help="beside stock; small parameters travel whole unless dense_below says otherwise",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

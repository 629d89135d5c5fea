"""Step time of a model with many small parameters, compared with stock Horovod: the Python overhead per parameter.

    mpirun -np 2 python -m benchmarks.parameters

A contender is "stock" or a compression; dense_below=0 also compresses small parameters. Each turn creates, trains and
discards one optimizer. The time of a turn is the median over its steps on the slowest rank. The table shows the fastest
turn, in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line
from benchmarks.runner import Measure, Record, add_arguments, column, run, table
from horovod_sparse.cli.units import at_least

_STOCK = "stock"
_COLUMNS = {"construction": "construction", "full step": "step", "step() alone": "alone"}


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = command_line("parameters", __doc__)
    add_arguments(parser, (_STOCK, "topka:density=0.01", "topka:density=0.01,dense_below=0"), turns=3)
    add = parser.add_argument
    add("--parameters", type=at_least(1), default=2000, help="number of parameters")
    add("--elements", type=at_least(1), default=64, help="elements per parameter")
    add("--steps", type=at_least(1), default=20, help="steps per turn")
    options = parser.parse_args()
    hvd.init()
    cell = {name: getattr(options, name) for name in ("parameters", "elements", "steps")} | {"ranks": hvd.size()}
    columns = {head: column(name, ".1f", min) for head, name in _COLUMNS.items()}
    run(options, [cell], _open_cell, partial(table, "ms", columns=columns), hvd.rank(), hvd.broadcast_object)


@contextmanager
def _open_cell(parameters: int, elements: int, steps: int, ranks: int) -> Iterator[Measure]:
    del ranks  # a setting of mpirun

    def measure(name: str) -> Record:
        kind: Callable[..., Any] = hvd.DistributedOptimizer
        if name != _STOCK:
            kind = partial(hvs.DistributedOptimizer, compression=hvs.parse(name))
        return dict(zip(_COLUMNS.values(), _turn(kind, parameters, elements, steps), strict=True))

    yield measure


def _turn(wrapper: Callable[..., Any], parameters: int, elements: int, count: int) -> tuple[float, ...]:
    """Return the milliseconds of construction, of a full step and of ``step()`` alone, each on the slowest rank."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(elements) for _ in range(parameters))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.barrier()
    start = time.perf_counter()
    optimizer = wrapper(plain, named_parameters=model.named_parameters())
    made = time.perf_counter() - start
    steps, alone = [], []
    for _ in range(count):
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


if __name__ == "__main__":
    main()

"""Step times of a training on an emulated cluster, compared with Horovod and with computing alone.

One rank on each node trains a model on random data. A contender is

- "alone": one allreduce of 4 bytes per step instead of the gradients,
- "horovod", "horovod-fp16", or "powersgd" (rank 4, DistributedDataParallel over Gloo),
- a configuration of ours, which exchanges gradients in every step,
- or one of ``hvs.LocalOptimizer``: configuration, local steps, and with streaming fragments and delay, as in
  "topka:density=0.03,wire=log4 / 32 / 4 / 8".

"@ spin" or "@ sleep" after a contender sets HOROVOD_SPARSE_WAIT. Times are those of the slowest rank, in ms: of the
median step, its median, least and most over the turns; and of the mean step, which contains the exchanges of local
steps. Exposed is what the mean step takes longer than "alone"; "waits" are the ms that ours counts itself, for which
the program waits for an exchange. Contenders whose steps are long take fewer of them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks import subcommand
from benchmarks.cluster.contenders import ALONE, FP16, HOROVOD
from benchmarks.cluster.emulated import Cluster
from benchmarks.runner import Found, Measure, Turns, add_arguments, column, run, spread, table, values
from horovod_sparse.cli.units import at_least, listed
from horovod_sparse.transport.waiting import SETTING

_CONTENDERS = (ALONE, HOROVOD, FP16, "recommended", "topka")


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time training steps, compared with Horovod and with computing alone"
    parser = subcommand(commands, "steps", about, __doc__, start)
    add_arguments(parser, _CONTENDERS, turns=4)
    add = parser.add_argument
    add("--nodes", type=at_least(1), default=4, help="one rank on each; all nodes share this machine's cores")
    add("--models", type=listed(str), default="cnn", help="models to train: cnn, transformer, wide")
    add("--rates", type=listed(str), default="none,1gbit,100mbit", help="rates of the links")
    add("--delays", type=listed(float), default="0", help="milliseconds that links add, one way")
    add("--cycle-time", type=at_least(1), default=1, help="milliseconds between wake-ups of Horovod's thread")
    add("--batch-size", type=at_least(1), help="samples per rank and step; default: the model's")
    add("--steps", type=at_least(1), default=96, help="timed steps per turn, a multiple of the local steps")


def start(options: argparse.Namespace) -> int:
    """Measure and print a table for each model, delay and rate."""
    same = {name: getattr(options, name) for name in ("nodes", "cycle_time", "batch_size", "steps")}
    cells = itertools.product(options.models, options.delays, options.rates)
    names = ("model", "delay", "rate")
    return run(options, [{**dict(zip(names, cell, strict=True)), **same} for cell in cells], _open_cell, show)


@contextmanager
def _open_cell(
    model: str, delay: float, rate: str, nodes: int, cycle_time: int, batch_size: int | None, steps: int
) -> Iterator[Measure]:
    with Cluster(nodes, rate, delay / 1000) as cluster:

        def measure(contender: str) -> Any:
            name, _, wait = contender.partition(" @ ")
            setting = ["-x", f"{SETTING}={wait or 'auto'}", "-x", f"HOROVOD_CYCLE_TIME={cycle_time}"]
            return cluster.call(
                nodes, "benchmarks.cluster.stepping:timed", model, name, steps, batch_size, options=setting
            )

        yield measure


def show(found: Found) -> str:
    """Return the table of a cell."""
    alone = median(values(found[ALONE], "mean")) if ALONE in found else 0.0

    def exposed(turns: Turns) -> str:
        return f"{100 * (median(values(turns, 'mean')) / alone - 1):.1f} %" if alone else ""

    more = {"exposed": exposed, "waits": column("exposed"), "rounds": column("rounds"), "KB sent": column("kilobytes")}
    return table("ms a step", found, {**spread("milliseconds"), "mean": column("mean", ".1f"), **more})

"""Step times of a training on an emulated cluster, compared with Horovod and with computing alone.

A small CNN (1.2 million parameters) trains on random images. A contender is "alone" (one allreduce of 4 bytes per step
instead of the gradients), "horovod", "horovod-fp16", "powersgd" (rank 4, DistributedDataParallel over Gloo), or a
configuration of ours; those of ours run once for each value of HOROVOD_SPARSE_WAIT. Contenders alternate, as the
machine may be shared. Times are medians over the turns; rounds of messages per step are counted for ours.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks import last_line, print_on_rank_0, subcommand
from benchmarks.cluster.contenders import PEERS
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least, listed
from horovod_sparse.transport.waiting import SETTING

_WARMUP, _TRIALS = 15, 120  # steps before the timed ones; more where the density is measured in the training


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time training steps, compared with Horovod and with computing alone"
    add = subcommand(commands, "waiting", about, __doc__, run).add_argument
    add("--ranks", type=at_least(1), default=4, help="one on each node; all nodes share this machine's cores")
    add("--rates", type=listed(str), default="none,1gbit,100mbit", help="rates of the links")
    add("--delays", type=listed(float), default="0", help="milliseconds that links add, one way")
    add("--contenders", type=listed(str), default="alone,horovod,horovod-fp16,recommended,topka", help="contenders")
    add("--waits", type=listed(str), default="spin,sleep", help=f"values of {SETTING} for configurations of ours")
    add("--cycle-time", type=at_least(1), default=1, help="milliseconds between wake-ups of Horovod's thread")
    add("--batch-size", type=at_least(1), default=32, help="images per rank and step")
    add("--steps", type=at_least(1), default=100, help="timed steps per turn")
    add("--turns", type=at_least(1), default=4, help="turns of each contender")


def run(options: argparse.Namespace) -> int:
    """Measure and print a table for each rate."""
    pairs = [(name, wait) for name in options.contenders for wait in (("",) if name in PEERS else options.waits)]
    for delay in options.delays:
        with Cluster(options.ranks, options.rates[0], delay / 1000) as cluster:
            for rate in options.rates:
                cluster.set_rate(rate)
                times: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
                for _, (name, wait) in itertools.product(range(options.turns), pairs):
                    arguments = ["-m", "benchmarks.cluster.waiting", name, str(options.batch_size), str(options.steps)]
                    setting = ["-x", f"{SETTING}={wait or 'auto'}", "-x", f"HOROVOD_CYCLE_TIME={options.cycle_time}"]
                    times[name, wait].append(last_line(cluster.python(options.ranks, arguments, setting)))
                print(f"\n{rate}, {delay:g} ms one way, {options.ranks} ranks")
                show(times)
    return 0


def show(times: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Print the milliseconds of a step: median over the turns, and the range; and the rounds of messages."""
    print(f"{'ms a step':34}{'median':>8}{'least':>8}{'most':>8}{'rounds':>8}")
    for (name, wait), results in times.items():
        label = f"{name} ({wait})" if wait else name
        steps = [milliseconds for milliseconds, _ in results]
        rounds = f"{results[0][1]:8.2f}" if results[0][1] else ""
        print(f"{label:34}{median(steps):8.1f}{min(steps):8.1f}{max(steps):8.1f}{rounds}", flush=True)


# --- under mpirun --------------------------------------------------------------------------------------------------


def contender(name: str, samples: int, steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step on the slowest rank, and the rounds of a step; 0: not counted."""
    import horovod_sparse as hvs
    from benchmarks.cluster.stepping import Training, slowest
    from horovod_sparse.schedules import Measured

    measured = name not in PEERS and isinstance(hvs.parse(name).schedule, Measured.Options)
    training = Training("cnn", name, samples)
    for _ in range(_TRIALS if measured else _WARMUP):
        training.step()
    counting = hasattr(training.optimizer, "statistics")
    if counting:
        training.optimizer.statistics()
    times = [training.step() for _ in range(steps)]
    rounds = training.optimizer.statistics()["total/rounds"] / steps if counting else 0
    return slowest(1e3 * median(times)), rounds


if __name__ == "__main__":
    print_on_rank_0(contender(sys.argv[1], *map(int, sys.argv[2:])))

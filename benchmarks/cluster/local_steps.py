"""Time that local steps wait for their exchanges on slow links of an emulated cluster.

One rank on each node trains a model on random data. A contender is "alone" (one allreduce of 4 bytes per step), a
configuration of ours that exchanges gradients in every step, or one of ``hvs.LocalOptimizer``: configuration, local
steps, and with streaming fragments and delay, as in "topka:density=0.03,wire=log4 / 32 / 4 / 8". Each turn takes whole
rounds, and its time is the mean of its steps on the slowest rank, exchanges included; what is longer than "alone" is
exposed. Contenders alternate, as the machine may be shared.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks import last_line, print_on_rank_0, subcommand
from benchmarks.cluster.contenders import ALONE
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least, listed

_SPEC = "topka:density=0.03,wire=log4"
_CONTENDERS = (ALONE, "recommended:density=0.01", "dense / 32", f"{_SPEC} / 32", f"{_SPEC} / 32 / 4 / 8")


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time local steps, with and without streaming, on slow links"
    add = subcommand(commands, "local-steps", about, __doc__, run).add_argument
    add("--nodes", type=at_least(2), default=4, help="number of nodes, one rank on each")
    add("--models", type=listed(str), default="cnn,transformer", help="models to train")
    add("--rates", type=listed(str), default="100mbit,10mbit,1mbit", help="rates of the links")
    add("--contenders", nargs="+", default=[*_CONTENDERS], help="what to compare")
    add("--steps", type=at_least(1), default=96, help="timed steps per turn, a multiple of the local steps")
    add("--turns", type=at_least(1), default=3, help="turns of each contender")


def run(options: argparse.Namespace) -> int:
    """Measure and print a table for each model and rate."""
    with Cluster(options.nodes, options.rates[0]) as cluster:
        for model, rate in itertools.product(options.models, options.rates):
            cluster.set_rate(rate)
            found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
            for _, name in itertools.product(range(options.turns), options.contenders):
                arguments = ["-m", "benchmarks.cluster.local_steps", model, name, str(options.steps)]
                found[name].append(tuple(last_line(cluster.python(options.nodes, arguments))))
            print(f"\n{model}, {rate}, {options.nodes} ranks", *rows(found), sep="\n", flush=True)
    return 0


def rows(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return the lines of a table: times of a step over the turns, what is exposed of them, and bytes."""
    alone = median(milliseconds for milliseconds, _ in found[ALONE]) if ALONE in found else 0.0
    lines = [f"{'ms a step':44}{'median':>8}{'least':>8}{'most':>8}{'exposed':>9}{'KB sent':>9}"]
    for name, turns in found.items():
        times, sent = [one for one, _ in turns], median(kilobytes for _, kilobytes in turns)
        exposed = f"{100 * (median(times) / alone - 1):7.1f} %" if alone else " " * 9
        lines.append(f"{name:44}{median(times):8.1f}{min(times):8.1f}{max(times):8.1f}{exposed}{sent:9.2f}")
    return lines


# --- under mpirun --------------------------------------------------------------------------------------------------


def contender(model: str, name: str, steps: int) -> tuple[float, float]:
    """Return the mean milliseconds of a step on the slowest rank, and the kilobytes that a rank sends in one."""
    from benchmarks.cluster.stepping import Training, mean, slowest

    training = Training(model, name)
    counted = hasattr(training.optimizer, "traffic")
    rounds = [int(number) for number in name.split(" / ")[1:2]]  # a whole round, in which the first exchange connects
    for _ in range(rounds[0] if rounds else 15):
        training.step()
    before = training.optimizer.traffic.bytes_sent if counted else 0
    seconds = sum(training.step() for _ in range(steps))
    sent = training.optimizer.traffic.bytes_sent - before if counted else 0
    return slowest(1e3 * seconds / steps), mean(sent / 1e3 / steps)


if __name__ == "__main__":
    print_on_rank_0(contender(sys.argv[1], sys.argv[2], int(sys.argv[3])))

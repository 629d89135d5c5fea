"""Trains small models with every compression and shows accuracy or perplexity, bytes sent and residual memory.

    python -m benchmarks.convergence --output runs/convergence
    python -m benchmarks.convergence --quick --tasks digits --runs dense,topka
    python -m benchmarks.convergence --report runs/convergence

Four ranks on this machine, under one mpirun. Writes result.json, report.md and a figure for each task. Two cores take
less than 40 minutes for everything, 5 for --quick. Start it in the repository's root.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import command_line
from benchmarks.convergence.runs import RUNS, TASKS, Job
from horovod_sparse.cli.units import at_least, listed

STEPS, QUICK_STEPS = 300, 200
SEEDS, QUICK_SEEDS = 3, 1


def build_parser() -> argparse.ArgumentParser:
    """The command line, of the command and of each rank."""
    parser = command_line("convergence", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_SEEDS} seed, {QUICK_STEPS} steps, the most important runs")
    add("--tasks", type=_names(TASKS), default=list(TASKS), help=f"of {','.join(TASKS)}")
    add("--runs", type=_names(RUNS), help=f"of {','.join(RUNS)}")
    add("--seeds", type=at_least(1), help=f"how many, {SEEDS} by default")
    add("--steps", type=at_least(1), help=f"of a run, {STEPS} by default")
    add("--output", type=Path, default=Path("runs/convergence"), help="folder for the results")
    add("--resume", action="store_true", help="keep what result.json holds already, and train only what is missing")
    add("--report", type=Path, metavar="DIR", help="train nothing; write tables and figures from DIR/result.json anew")
    return parser


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A converter of names separated by commas."""

    def convert(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown name {name!r}; known are: {', '.join(known)}")
        return name

    return listed(convert)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Trainings that are asked for; a seed of everything first, so that early results show the whole picture."""
    quick = options.quick
    names = options.runs or [run.name for run in RUNS.values() if run.quick or not quick]
    seeds = options.seeds or (QUICK_SEEDS if quick else SEEDS)
    steps = options.steps or (QUICK_STEPS if quick else STEPS)
    return [
        Job(task, RUNS[name], seed, steps)
        for seed, task, name in itertools.product(range(seeds), options.tasks, names)
        if task in RUNS[name].tasks
    ]

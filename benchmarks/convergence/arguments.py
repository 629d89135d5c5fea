"""Trains models with every compression and shows accuracy or perplexity, bytes sent and residual memory.

    python -m benchmarks.convergence --quick                # small tasks, one seed
    python -m benchmarks.convergence --headline             # the rows that the main sources are about
    python -m benchmarks.convergence --minutes 60           # everything, as far as an hour takes it
    python -m benchmarks.convergence --report runs/convergence    # tables and figures again, without training

Four ranks on this machine, under one mpirun; with --simulate, any number of threads of one process (same bits). Every
finished run is a line of records.jsonl, and is not trained again: a call goes on where the last one ended. Writes
report.md and a figure for each task. Two cores take 5 minutes for --quick, else 1.5 to 3 minutes a training. Start it
in the repository's root.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import command_line
from benchmarks.convergence.runs import CONFIRMATION, FASHION, HEADLINE_SEEDS, RANKS, RUNS, SMALL, STDLIB, Job, Run
from horovod_sparse.cli.units import at_least, listed

QUICK_STEPS = 200
# Steps of a training of each task: 5 epochs of Fashion-MNIST with 4 ranks of 64 pictures.
STEPS = {FASHION: 5 * 234, STDLIB: 1000, CONFIRMATION: 1000, **dict.fromkeys(SMALL, QUICK_STEPS)}


def build_parser() -> argparse.ArgumentParser:
    """The command line, of the command and of each rank."""
    parser = command_line("convergence", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{', '.join(SMALL)}, one seed, the most important runs")
    add("--headline", action="store_true", help="only the rows that the main sources are about, with all their seeds")
    add("--tasks", type=_names(STEPS), help=f"of {','.join(STEPS)}")
    add("--runs", type=_names(RUNS), help=f"of {','.join(RUNS)}".replace("%", "%%"))
    add("--seeds", type=at_least(1), help="at most so many")
    add("--steps", type=at_least(1), help="of a run, as the task has them by default")
    add("--ranks", type=at_least(1), default=RANKS, help="world size; one --output folder for each")
    add("--simulate", action="store_true", help="ranks are threads of one process, without MPI: the same bits")
    add("--minutes", type=float, default=math.inf, help="begin no run after so many")
    add(
        "--fashion-mnist",
        type=Path,
        metavar="DIR",
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="folder of its IDX files; here is where Debian's package dataset-fashion-mnist puts them",
    )
    add("--output", type=Path, default=Path("runs/convergence"), help="folder for the results")
    add("--report", type=Path, metavar="DIR", help="train nothing; write tables and figures of DIR/records.jsonl anew")
    add("--page", type=Path, help="with --report: where its tables go, between marks")
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
    runs = [RUNS[name] for name in options.runs or RUNS]
    pairs = [(task, run) for task in options.tasks or STEPS for run in runs if _wanted(task, run, options)]
    return [
        Job(task, run, seed, options.steps or run.longer * STEPS[task], options.ranks)
        for seed, (task, run) in itertools.product(range(HEADLINE_SEEDS), pairs)
        if seed < min(_seeds(task, run, options), options.seeds or HEADLINE_SEEDS)
    ]


def _wanted(task: str, run: Run, options: argparse.Namespace) -> bool:
    if options.headline:
        return task in run.headline
    if options.quick:
        return task in SMALL and run.quick
    # What is named is trained, be it on a task where it is not by default.
    return task in run.tasks or bool(options.runs and options.tasks and (task not in SMALL or run.quick))


def _seeds(task: str, run: Run, options: argparse.Namespace) -> int:
    return 1 if options.quick else run.seeds_on(task)

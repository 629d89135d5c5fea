"""Accuracy or perplexity, bytes sent and residual memory of models trained with every compression.

    python -m benchmarks.convergence --quick                # small tasks, one seed
    python -m benchmarks.convergence --headline             # only the rows about the main sources
    python -m benchmarks.convergence --minutes 60           # everything, but start no run after an hour
    python -m benchmarks.convergence --report runs/convergence    # only rewrite tables and figures
    python -m benchmarks.convergence --validate --runs dense@0.7,dense@1.5 --output runs/rates    # compare rates
    python -m benchmarks.convergence --rules my_rules --compression topka:sparsifier=mine --output runs/mine

Runs four ranks on this machine under one mpirun. With --simulate, any number of ranks run as threads of one process,
with bit-identical results. Every finished run is appended to records.jsonl and is not repeated, so an interrupted
benchmark resumes. Writes report.md and a figure for each task. On two cores, --quick takes 5 minutes, and otherwise
each run takes 1.5 to 3 minutes. Run it from the repository root. The last command compares a rule of your own with the
published runs of dense training and of top-k at 1 %, seed by seed; --against recommended,oktopk adds others.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import horovod_sparse as hvs
from benchmarks import command_line
from benchmarks.convergence.runs import (
    CONFIRMATION,
    FASHION,
    HEADLINE_SEEDS,
    RANKS,
    RUNS,
    SMALL,
    STDLIB,
    TEN_MILLION,
    Job,
    Run,
    own,
)
from horovod_sparse.cli.units import at_least, listed

QUICK_STEPS = 200
# Steps per run of each task. Fashion-MNIST: 5 epochs with 4 ranks of 64 images.
STEPS = {
    FASHION: 5 * 234,
    **dict.fromkeys((STDLIB, TEN_MILLION, CONFIRMATION), 1000),
    **dict.fromkeys(SMALL, QUICK_STEPS),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser of the command and of each rank."""
    parser = command_line("convergence", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{', '.join(SMALL)}, one seed, the most important runs")
    add("--headline", action="store_true", help="only the rows about the main sources, with all seeds")
    add("--tasks", type=names_of(STEPS), help=f"tasks to train, out of {','.join(STEPS)}")
    help_ = (
        "runs to train, with @ and a factor on the learning rate if wanted, and for local steps another @ and the rate "
        f"of the outer step, out of {','.join(RUNS)}"
    )
    add("--runs", type=names_of(RUNS), help=help_.replace("%", "%%"))
    add("--rules", action="append", default=[], metavar="MODULE", help="module that registers custom rules")
    add(
        "--compression",
        action="append",
        default=[],
        metavar="SPEC",
        help="train this configuration, with momentum; repeat it for several, and use a separate --output folder",
    )
    help_ = "with --compression, or --report: published runs to compare with besides dense and topka"
    add("--against", type=names_of(RUNS), default=[], help=help_)
    add(
        "--validate",
        action="store_true",
        help="hold out the last tenth of the training part, and evaluate on it; use a separate --output folder",
    )
    add("--seeds", type=at_least(1), help="maximum number of seeds per run")
    add("--steps", type=at_least(1), help="steps per run (default: the task's)")
    add("--ranks", type=at_least(1), default=RANKS, help="world size; use a separate --output folder for each")
    add("--batch", type=at_least(1), default=0, help="samples per rank and step (default: the task's)")
    add(
        "--simulate",
        action="store_true",
        help="run ranks as threads of one process, without MPI; results are bit-identical",
    )
    add("--minutes", type=float, default=math.inf, help="start no run after this number of minutes")
    add(
        "--fashion-mnist",
        type=Path,
        metavar="DIR",
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="folder of the IDX files; by default, that of Debian's package dataset-fashion-mnist",
    )
    add("--output", type=Path, default=Path("runs/convergence"), help="folder for the results")
    add("--report", type=Path, metavar="DIR", help="train nothing; rewrite the tables and figures of DIR/records.jsonl")
    add(
        "--page",
        action="append",
        default=[],
        type=Path,
        help="with --report: page to write the tables into, between its markers; repeat it for several",
    )
    return parser


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names."""

    def convert(name: str) -> str:
        if name.partition("@")[0] not in known:
            raise argparse.ArgumentTypeError(f"unknown name {name!r}; known are: {', '.join(known)}")
        return name

    return listed(convert)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the requested jobs, sorted by seed so that early results cover all runs."""
    runs = [run_named(name) for name in options.runs or [own(spec) for spec in options.compression] or RUNS]
    pairs = [(task, run) for task in options.tasks or STEPS for run in runs if _wanted(task, run, options)]
    return [
        Job(task, run, seed, options.steps or run.longer * STEPS[task], options.ranks, options.batch)
        for seed, (task, run) in itertools.product(range(HEADLINE_SEEDS), pairs)
        if seed < min(_seeds(task, run, options), options.seeds or HEADLINE_SEEDS)
        and (run.simulated or not options.simulate)
    ]


def load_rules(options: argparse.Namespace) -> None:
    """Import the modules that register custom rules, and check the configurations of the command line.

    Raises:
        ImportError: A module cannot be imported.
        ValueError: A configuration is invalid.
    """
    for module in options.rules:
        importlib.import_module(module)
    for spec in options.compression:
        hvs.parse(spec)


def run_named(name: str) -> Run:
    """Return the run of a name, possibly with a factor on the learning rate, and the rate of the outer step."""
    known, *rates = name.split("@")
    run = RUNS[known]
    if len(rates) > 1:
        run = replace(run, outer=(float(rates[1]), run.outer[1]))
    return replace(run, name=name, rate=float(rates[0])) if rates else run


def _wanted(task: str, run: Run, options: argparse.Namespace) -> bool:
    if options.headline:
        return task in run.headline
    if options.quick:
        return task in SMALL and run.quick
    # A run that is named together with a task is trained on it, even if it is not by default.
    named = options.runs or options.compression
    return task in run.tasks or bool(named and options.tasks and (task not in SMALL or run.quick))


def _seeds(task: str, run: Run, options: argparse.Namespace) -> int:
    return 1 if options.quick else run.seeds_on(task)

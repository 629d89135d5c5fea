"""Trains small models with every compression and shows accuracy or perplexity, bytes sent and residual memory.

    python -m benchmarks.convergence --output runs/convergence
    python -m benchmarks.convergence --quick --tasks digits --runs dense,topka
    python -m benchmarks.convergence --report runs/convergence

Four ranks on this machine, under one mpirun. Writes result.json, report.md and a figure for each task. Two cores take
less than 40 minutes for everything, 5 for --quick. Start it in the repository's root.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import argparse
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Sequence

from benchmarks.convergence_report import report
from benchmarks.convergence_runs import RUNS, Job
from benchmarks.tasks import TASKS
from horovod_sparse.cli.units import at_least, listed
from mpitest import launch

RANKS = 4
STEPS, QUICK_STEPS = 300, 200
SEEDS, QUICK_SEEDS = 3, 1

# Seconds after which mpirun is ended: for the start, and for a run, which takes some 8 s on two cores.
_START, _RUN = 120, 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and reports; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(words)
    if options.report is not None:
        return _report(options.report)
    if shutil.which("mpirun") is None:
        print("convergence: mpirun is not on PATH: run `make venv`, or load the module of your MPI", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    # Horovod's thread looks for work once a millisecond by default, which takes half of the cores that the ranks share.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "10")
    # `-m mpi4py` ends all ranks where one fails.
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.convergence_worker", *words]
    error = launch(["mpirun", "-np", str(RANKS), *program], _START + _RUN * len(jobs(options)))
    if error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    return _report(options.output)


def _report(folder: Path) -> int:
    try:
        print(report(folder))
    except (OSError, ValueError) as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line, also that of the worker."""
    summary, _, details = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    """What the command line asks for; a seed of everything first, so that early results show the whole picture."""
    quick = options.quick
    names = options.runs or [run.name for run in RUNS.values() if run.quick or not quick]
    seeds = options.seeds or (QUICK_SEEDS if quick else SEEDS)
    steps = options.steps or (QUICK_STEPS if quick else STEPS)
    return [
        Job(task, RUNS[name], seed, steps)
        for seed, task, name in itertools.product(range(seeds), options.tasks, names)
        if task in RUNS[name].tasks
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Command line of the convergence benchmark: starts the ranks and writes the report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.arguments import build_parser, jobs, load_rules
from benchmarks.convergence.report import report
from tools.mpitest import launch

# Seconds after which mpirun is ended: for the start, and per run, which takes about 80 s on two cores.
_START, _RUN = 180, 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and report; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(words)
    try:
        load_rules(options)
    except (ImportError, ValueError) as problem:
        print(f"convergence: {problem}", file=sys.stderr)
        return 1
    if options.report is not None:
        return _report(options.report, options.against, options.page)
    if options.simulate:
        from benchmarks.convergence.worker import simulate  # loads torch

        options.output.mkdir(parents=True, exist_ok=True)
        simulate(options, jobs(options))
        return _report(options.output, options.against)
    if shutil.which("mpirun") is None:
        print("convergence: mpirun is not on PATH: run `make venv`, or load your MPI module", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    # `-m mpi4py` aborts all ranks if one fails.
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.convergence.worker", *words]
    error = launch(["mpirun", "-np", str(options.ranks), *program], _START + _RUN * len(jobs(options)))
    if error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    return _report(options.output, options.against)


def _report(folder: Path, against: Sequence[str], pages: Sequence[Path] = ()) -> int:
    try:
        print(report(folder, pages, against))
    except (OSError, ValueError) as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

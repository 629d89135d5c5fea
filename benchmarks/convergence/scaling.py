"""Accuracy over bytes on 4, 16 and 64 simulated ranks: the preset, other collectives, dense training.

    python -m benchmarks.convergence.scaling                             # everything; call it again to resume
    python -m benchmarks.convergence.scaling --tasks stdlib --ranks 64 --seeds 1 --runs recommended-oktopk
    python -m benchmarks.convergence.scaling --report docs/data/scaling --page docs/scaling.md

Ranks are threads of this process, which keeps one to two cores busy. On a core of 2024, a run of 64 ranks takes 9
minutes, of 16 ranks 6, of 4 ranks 80 seconds. Every finished run is appended to records.jsonl and is not repeated; nor
are the published ones in docs/data. Several processes can share a folder if their parts have no run in common.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks import command_line
from benchmarks.convergence.arguments import STEPS, names_of, run_named
from benchmarks.convergence.results import Record, read_records, records_path
from benchmarks.convergence.runs import ADAM, FASHION, SEEDS, STDLIB, Job
from benchmarks.convergence.scaling_report import NESTEROV, PRESET, TOPKA, contenders, write
from horovod_sparse.cli.units import at_least, listed

RUNS = (*contenders("SGD"), *contenders("AdamW"))
# Dense training and the preset have three seeds, all others one.
HEADLINE = (NESTEROV, ADAM, *(f"{name}{suffix}" for name in (PRESET, TOPKA) for suffix in ("", "-adam")))


@dataclass(frozen=True)
class Cell:
    """Length of a training on a number of ranks, and size of its steps."""

    batch: int  # samples per rank and step; 0: the task's
    steps: int
    rate: float = 1.0  # factor on the task's peak learning rate, with SGD; AdamW has the task's


# 16 ranks divide the batch of 4. On 64 the batch of all ranks is four times as large.
CELLS = {
    STDLIB: {4: Cell(0, STEPS[STDLIB]), 16: Cell(1, STEPS[STDLIB]), 64: Cell(1, 300, 0.5)},
    FASHION: {4: Cell(0, STEPS[FASHION]), 16: Cell(16, STEPS[FASHION]), 64: Cell(16, 300, 0.5)},
}
RANKS = (*CELLS[STDLIB],)
_DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
PUBLISHED = (_DATA, _DATA / "wider")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line("convergence.scaling", __doc__)
    add = parser.add_argument
    add("--ranks", type=listed(_ranks), default=RANKS, help=f"numbers of ranks, out of {','.join(map(str, RANKS))}")
    add("--tasks", type=names_of(CELLS), default=(*CELLS,), help=f"tasks to train, out of {','.join(CELLS)}")
    add("--runs", type=names_of(RUNS), default=RUNS, help=f"out of {','.join(RUNS)}")
    add("--seeds", type=at_least(1), default=SEEDS, help="maximum number of seeds per run")
    add("--steps", type=at_least(1), help="steps per run (default: the task's on that number of ranks)")
    add("--minutes", type=float, default=math.inf, help="start no run after this number of minutes")
    add("--fashion-mnist", type=Path, metavar="DIR", default=Path("/usr/share/datasets/fashion-mnist"))
    add("--output", type=Path, default=Path("runs/scaling"), help="folder for the results")
    add("--report", type=Path, metavar="DIR", help="train nothing; write the tables and the figure of a folder")
    add("--page", action="append", default=[], type=Path, help="with --report: page to write the tables into")
    parser.set_defaults(validate=False)
    return parser


def _ranks(text: str) -> int:
    if text not in map(str, RANKS):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, RANKS))}")
    return int(text)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the requested jobs, sorted by seed and then by number of ranks, so that early results cover all runs."""
    return [
        _job(task, name, seed, ranks, options.steps)
        for seed, ranks, task, name in product(range(options.seeds), options.ranks, options.tasks, options.runs)
        if seed < (SEEDS if name in HEADLINE else 1)
    ]


def _job(task: str, name: str, seed: int, ranks: int, steps: int | None) -> Job:
    cell = CELLS[task][ranks]
    rate = 1 if name.endswith("adam") else cell.rate
    run = run_named(name if rate == 1 else f"{name}@{rate:g}")
    return Job(task, run, seed, steps or cell.steps, ranks, cell.batch)


def published() -> list[Record]:
    """Return the records of other benchmarks' trainings, some of which are jobs of this one."""
    return [record for folder in PUBLISHED for record in read_records(records_path(folder))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and report; return the exit status."""
    options = build_parser().parse_args(arguments)
    folder, known = options.report or options.output, published()
    wanted = jobs(options)
    if options.report is None:
        from benchmarks.convergence.worker import simulate  # loads torch

        folder.mkdir(parents=True, exist_ok=True)
        simulate(options, [job for job in wanted if not any(job.made(record) for record in known)])
    try:
        print(write(wanted, known + read_records(records_path(folder)), folder, options.page))
    except (OSError, ValueError) as error:
        print(f"convergence.scaling: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures on an emulated cluster how long each exchange takes to train a model to a given accuracy.

The model, the data and the trainings are those of benchmarks.convergence; evaluations are not counted. Exchanges take
turns, so that a slow hour of the machine is one of them all. Every finished training is a line of records.jsonl, and is
not made again: a call goes on where the last one ended. Afterwards, or with nothing left to train, accuracy.md and
accuracy.png show what the records say:

    python -m benchmarks.cluster accuracy --output docs/data/accuracy --page docs/performance.md    # this project's
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.accuracy_report import outcomes, plot, table
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from benchmarks.convergence.report import filled
from benchmarks.convergence.results import read_records, records_path
from benchmarks.convergence.runs import FASHION, RUNS, Job, Run
from horovod_sparse.cli.units import at_least, listed

# What a user chooses between, by the names of the tables and figures.
EXCHANGES: dict[str, Run] = {
    "Horovod dense": RUNS["dense"],
    "Horovod fp16": RUNS["fp16"],
    "DDP, PowerSGD 4": RUNS["powersgd-4"],
    "topka 1 %": RUNS["topka"],
    "oktopk 1 %, bfloat16": Run("oktopk-bfloat16", "time to accuracy", "oktopk:density=0.01,wire=bfloat16"),
    "oktopk 1 %, 8 bit": Run("oktopk-log8", "time to accuracy", "oktopk:density=0.01,wire=log8"),
    "recommended, 1 %": Run("recommended", "time to accuracy", "recommended"),
    "8 local steps, 8 bit": Run("local-8", "time to accuracy", "topka:density=0.01,wire=log8", local_steps=8),
}
_BY_NAME = {run.name: run for run in EXCHANGES.values()}
PART = "accuracy"  # of a page: its marks
EVALUATIONS = 26  # every 18 steps of 468
_DENSE = ("none", "fp16")  # without compression, and so rings

_RANK = ("-m", "mpi4py", "-m", "benchmarks.cluster.accuracy")  # this file as a program; a failing rank ends all


def add_parser(commands: Any) -> None:
    """Adds this subcommand."""
    parser = commands.add_parser(
        "accuracy",
        help="compare the time that each exchange takes to an accuracy",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=4, help="one rank on each")
    add("--rates", type=listed(str), default="100mbit,1gbit", help="of every link")
    add("--seeds", type=at_least(1), default=3, help="trainings of each exchange at each rate")
    add("--exchanges", type=listed(str), default=",".join(_BY_NAME), help="their names")
    add("--target", type=float, default=0.89, help="the accuracy")
    add("--page", type=Path, help="where the table goes, between marks; as it is: accuracy.md")
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what each rank is told, too."""
    add = parser.add_argument
    add("--task", choices=(FASHION, "digits"), default=FASHION, help="of benchmarks.convergence")
    add("--steps", type=at_least(1), default=2 * 234, help="of a training; 234 are an epoch of Fashion-MNIST")
    add("--fashion-mnist", default="/usr/share/datasets/fashion-mnist", metavar="DIR", help="folder of its IDX files")
    add("--output", type=Path, default=Path("runs/accuracy"), help="folder for the results")


def run(options: argparse.Namespace) -> int:
    """Trains what has no record yet, and writes table and figure.

    Raises:
        ValueError: An exchange is unknown.
        RuntimeError: No cluster can be made, or a training failed.
    """
    if unknown := set(options.exchanges) - _BY_NAME.keys():
        raise ValueError(f"unknown exchange {min(unknown)!r}; known are: {', '.join(_BY_NAME)}")
    options.output.mkdir(parents=True, exist_ok=True)
    shared = ("task", "steps", "fashion_mnist", "output")
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in shared]
    for rate, seed, name in waiting(options):
        with Cluster(options.nodes, rate) as cluster:
            program = [sys.executable, *_RANK, *words, f"--rate={rate}", f"--seed={seed}", f"--exchange={name}"]
            choice = RING if _BY_NAME[name].spec in _DENSE else ()
            if status := cluster.mpirun(options.nodes, program, choice, capture=False).returncode:
                raise RuntimeError(f"{name} at {rate} failed with status {status}")
    report(options)
    return 0


def report(options: argparse.Namespace) -> None:
    """Prints and writes what the records say."""
    asked = {"task": options.task, "steps": options.steps}
    records = [one for one in read_records(records_path(options.output)) if asked.items() <= one.items()]
    found = outcomes(records, {label: one.name for label, one in EXCHANGES.items()}, options.target)
    text = table(found)
    print(text)
    if options.page is None:
        (options.output / "accuracy.md").write_text(f"{text}\n")
    else:
        options.page.write_text(filled(options.page.read_text(), {PART: text}))
    plot(found, options.output / "accuracy.png")


def waiting(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Rate, seed and exchange of each training that has no record yet, seed by seed."""
    records = read_records(records_path(options.output))
    for rate, seed, name in itertools.product(options.rates, range(options.seeds), options.exchanges):
        settings = {**Job(options.task, _BY_NAME[name], seed, options.steps).settings(), "rate": rate}
        if not any(settings.items() <= record.items() for record in records):
            yield rate, seed, name


def as_rank(arguments: Sequence[str] | None = None) -> None:
    """Trains by one exchange, with one seed, at one rate; under mpirun."""
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    from benchmarks.convergence.tasks import TASKS
    from benchmarks.convergence.training import train
    from horovod_sparse.transport.mpi import MPITransport

    parser = argparse.ArgumentParser(prog="accuracy")
    add_arguments(parser)
    add = parser.add_argument
    add("--rate", required=True)
    add("--seed", type=int, required=True)
    add("--exchange", required=True)
    options = parser.parse_args(arguments)
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    task = replace(TASKS[options.task], evaluations=EVALUATIONS)
    samples = task.load(Path(options.fashion_mnist))
    job = Job(options.task, _BY_NAME[options.exchange], options.seed, options.steps, hvd.size())
    record = train(task, samples, job, MPITransport(MPI.COMM_WORLD))
    if hvd.rank() == 0:
        with records_path(options.output).open("a") as file:
            file.write(json.dumps({**record, "rate": options.rate}) + "\n")
        print(f"{options.rate} {options.exchange}, seed {options.seed}: {record['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    as_rank()

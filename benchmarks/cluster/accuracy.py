"""Time that each exchange takes to train a model to a given accuracy, on an emulated cluster.

Model, data and training are those of benchmarks.convergence; evaluations are not timed. Exchanges alternate, so that a
slow period of the machine affects all of them. Every finished run is appended to records.jsonl and is not repeated, so
an interrupted benchmark resumes. After the last run, the results are written to accuracy.md and accuracy.png. The
command for this project's page is

    python -m benchmarks.cluster accuracy --output docs/data/accuracy --page docs/appendix/performance.md
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import subcommand
from benchmarks.cluster.accuracy_report import outcomes, plot, table
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from benchmarks.convergence.report import filled
from benchmarks.convergence.results import records_path
from benchmarks.convergence.runs import FASHION, RUNS, Job, Run
from benchmarks.runner import Record, Records
from horovod_sparse.cli.units import at_least, listed

# The exchanges that a user would choose from, by their labels in tables and figures.
EXCHANGES: dict[str, Run] = {
    "Horovod dense": RUNS["dense"],
    "Horovod fp16": RUNS["fp16"],
    "DDP, PowerSGD rank 4": RUNS["powersgd-4"],
    "topka 1 %": RUNS["topka"],
    "oktopk 1 %, bfloat16": Run("oktopk-bfloat16", "time to accuracy", "oktopk:density=0.01,wire=bfloat16"),
    "oktopk 1 %, log8": Run("oktopk-log8", "time to accuracy", "oktopk:density=0.01,wire=log8"),
    "recommended 1 %, fresh=0": Run("recommended", "time to accuracy", "recommended:fresh=0,density=0.01"),
    "8 local steps, log8": Run("local-8", "time to accuracy", "topka:density=0.01,wire=log8", local_steps=8),
}
_BY_NAME = {run.name: run for run in EXCHANGES.values()}
PART = "accuracy"  # name in the markers of a page
EVALUATIONS = 26  # per run: one every 18 of 468 steps
_DENSE = ("none", "fp16")  # not compressed, so they run as rings


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "compare the time that each exchange takes to reach an accuracy"
    add = subcommand(commands, "accuracy", about, __doc__, run).add_argument
    add("--task", choices=(FASHION, "digits"), default=FASHION, help="task of benchmarks.convergence")
    add("--steps", type=at_least(1), default=2 * 234, help="steps per run; 234 are one epoch of Fashion-MNIST")
    add("--fashion-mnist", default="/usr/share/datasets/fashion-mnist", metavar="DIR", help="folder of the IDX files")
    add("--output", type=Path, default=Path("runs/accuracy"), help="folder for the results")
    add("--nodes", type=at_least(2), default=4, help="number of nodes, one rank on each")
    add("--rates", type=listed(str), default="100mbit,1gbit", help="rates of the links")
    add("--seeds", type=at_least(1), default=3, help="runs per exchange and rate")
    add("--contenders", nargs="+", default=[*_BY_NAME], metavar="NAME", help="names of the exchanges")
    add("--target", type=float, default=0.89, help="accuracy to reach")
    add("--page", type=Path, help="page to write the table into, between its markers, instead of accuracy.md")


def run(options: argparse.Namespace) -> int:
    """Train what has no record yet, and write the table and the figure.

    Raises:
        ValueError: An exchange is unknown.
        RuntimeError: The cluster cannot be created, or a run failed.
    """
    if unknown := set(options.contenders) - _BY_NAME.keys():
        raise ValueError(f"unknown exchange {min(unknown)!r}; known are: {', '.join(_BY_NAME)}")
    records = Records(records_path(options.output))
    for key in records.missing(keys(options)):
        name, data = key["run"], options.fashion_mnist
        with Cluster(options.nodes, key["rate"]) as cluster:
            given = [options.task, name, key["seed"], options.steps, data]
            choice = RING if _BY_NAME[name].spec in _DENSE else ()
            record = cluster.call(options.nodes, "benchmarks.cluster.accuracy:contender", *given, options=choice)
        records.add(key, record)
        print(f"{key['rate']} {name}, seed {key['seed']}: {record['seconds']:.0f} s", flush=True)
    report(options)
    return 0


def keys(options: argparse.Namespace) -> Iterator[Record]:
    """Yield what identifies each run, seed by seed."""
    for rate, seed, name in itertools.product(options.rates, range(options.seeds), options.contenders):
        yield {**Job(options.task, _BY_NAME[name], seed, options.steps).settings(), "rate": rate}


def report(options: argparse.Namespace) -> None:
    """Print the table, and write the table and the figure."""
    settings = {"task": options.task, "steps": options.steps}
    lines = Records(records_path(options.output)).lines
    records = [record for record in lines if settings.items() <= record.items()]
    found = outcomes(records, {label: run.name for label, run in EXCHANGES.items()}, options.target)
    text = table(found)
    print(text)
    if options.page is None:
        (options.output / "accuracy.md").write_text(f"{text}\n")
    else:
        options.page.write_text(filled([options.page.read_text()], {PART: text})[0])
    plot(found, options.output / "accuracy.png")


def contender(task_name: str, name: str, seed: int, steps: int, fashion_mnist: str) -> Any:
    """Train with one exchange on all ranks, and return the record; a collective call."""
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    from benchmarks.convergence.tasks import TASKS
    from benchmarks.convergence.training import train
    from horovod_sparse.transport.mpi import MPITransport

    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    task = replace(TASKS[task_name], evaluations=EVALUATIONS)
    job = Job(task_name, _BY_NAME[name], seed, steps, hvd.size())
    return train(task, task.load(Path(fashion_mnist)), job, MPITransport(MPI.COMM_WORLD))

"""Ranks of `python -m benchmarks.convergence`, which train the configurations in sequence.

Starting torch and Horovod takes as long as a small run, so all runs share the processes. Rank 0 prints a line for each
and appends it to ``records.jsonl``, so that completed runs are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch
from mpi4py import MPI

from benchmarks.convergence.arguments import build_parser, jobs, load_rules
from benchmarks.convergence.results import read_records, records_path
from benchmarks.convergence.runs import Job
from benchmarks.convergence.tasks import TASKS, Samples, held_out
from benchmarks.convergence.training import Record, build, train
from horovod_sparse.transport.in_process import run_ranks
from horovod_sparse.transport.mpi import MPITransport

Training = Callable[[Job, tuple[Samples, Samples]], Record]


def main() -> None:
    """Train on every rank of MPI; the arguments are those of `python -m benchmarks.convergence`."""
    options = build_parser().parse_args()
    load_rules(options)
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    transport = MPITransport(MPI.COMM_WORLD)
    train_all(
        options,
        jobs(options),
        lambda job, samples: train(TASKS[job.task], samples, job, transport),
        transport.broadcast_object,
        first=transport.rank == 0,
    )


def simulate(options: argparse.Namespace, wanted: Sequence[Job]) -> None:
    """Train jobs with ranks that are threads of this process."""
    torch.set_num_threads(1)
    train_all(options, wanted, simulated, lambda item: item, first=True)


def simulated(job: Job, samples: tuple[Samples, Samples]) -> Record:
    """Return the record of a training run whose ranks are threads."""
    task = TASKS[job.task]
    model = build(task, job)  # here, as torch's generator is global
    replicas = [copy.deepcopy(model) for _ in range(job.ranks)]
    return run_ranks(job.ranks, lambda transport: train(task, samples, job, transport, replicas[transport.rank]))[0]


def train_all(
    options: argparse.Namespace,
    wanted: Sequence[Job],
    training: Training,
    shared: Callable[[bool], bool],
    *,
    first: bool,
) -> None:
    """Train the jobs that have no record in the folder yet.

    Args:
        options: Arguments of the command line.
        wanted: The jobs.
        training: Function that trains one of them on samples; a collective call.
        shared: Function that returns rank 0's value on all ranks.
        first: Whether this rank writes the records.
    """
    until = time.monotonic() + 60 * options.minutes
    path = records_path(options.output)
    records = read_records(path)
    waiting = [job for job in wanted if not any(job.made(record) for record in records)]
    samples = {name: TASKS[name].load(options.fashion_mnist) for name in {job.task for job in waiting}}
    if options.validate:
        samples = {name: held_out(train, len(test)) for name, (train, test) in samples.items()}
    for number, job in enumerate(waiting, start=1):
        if shared(time.monotonic() > until):
            print(f"{len(waiting) - number + 1} runs are left for the next invocation") if first else None
            break
        record = training(job, samples[job.task])
        if first:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{number}/{len(waiting)} {summary(record)}", flush=True)


def summary(record: Record) -> str:
    """Return a run's outcome in one line."""
    outcome = "diverged" if record["final"] is None else f"{record['metric']} {record['final']:.4g}"
    return (
        f"{record['task']} {record['run']} on {record['ranks']} ranks, seed {record['seed']}: {outcome}, "
        f"{record['bytes_sent'] / 1e6:.3f} MB sent, {record['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()

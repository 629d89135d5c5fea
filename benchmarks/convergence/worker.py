"""Ranks of `python -m benchmarks.convergence`: train one configuration after the other.

Starting torch and Horovod takes as long as a small run, so all runs share the processes. Rank 0 prints a line for each
and appends it to ``records.jsonl``, so that what is done is kept.
"""

from __future__ import annotations

import json
import time

import horovod.torch as hvd
import torch
from mpi4py import MPI

from benchmarks.convergence.arguments import build_parser, jobs
from benchmarks.convergence.results import read_records, records_path
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import Record, train
from horovod_sparse import metrics


def main() -> None:
    """Trains what the command line asks for; the arguments are those of `python -m benchmarks.convergence`."""
    options = build_parser().parse_args()
    until = time.monotonic() + 60 * options.minutes
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    metrics.enable()  # it counts the entries
    path = records_path(options.output)
    records = read_records(path)
    waiting = [job for job in jobs(options) if not any(job.made(record) for record in records)]
    samples = {name: TASKS[name].load(options.fashion_mnist) for name in {job.task for job in waiting}}
    for number, job in enumerate(waiting, start=1):
        if MPI.COMM_WORLD.bcast(time.monotonic() > until):
            print(f"{len(waiting) - number + 1} runs are left for the next call") if hvd.rank() == 0 else None
            break
        record = train(TASKS[job.task], samples[job.task], job)
        if hvd.rank() == 0:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{number}/{len(waiting)} {summary(record)}", flush=True)


def summary(record: Record) -> str:
    """A run's outcome in one line."""
    outcome = "diverged" if record["final"] is None else f"{record['metric']} {record['final']:.4g}"
    return (
        f"{record['task']} {record['run']} seed {record['seed']}: {outcome}, {record['bytes_sent'] / 1e6:.3f} MB sent, "
        f"{record['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()

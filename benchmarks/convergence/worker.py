"""Ranks of `python -m benchmarks.convergence`: train one configuration after the other.

Starting torch and Horovod takes as long as a run, so all runs share the processes. Rank 0 prints a line for each and
writes ``result.json`` anew, so that what is done is kept.
"""

from __future__ import annotations

import json
from pathlib import Path

import horovod.torch as hvd
import torch

from benchmarks.convergence.arguments import build_parser, jobs
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import Record, train
from examples.record import versions, write_json
from horovod_sparse import trace


def main() -> None:
    """Trains what the command line asks for; the arguments are those of `python -m benchmarks.convergence`."""
    options = build_parser().parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    trace.enable()  # it counts the entries
    path = options.output / "result.json"
    records = read(path) if options.resume else {}
    waiting = [job for job in jobs(options) if not any(job.made(record) for record in records.values())]
    samples = {name: TASKS[name].load() for name in {job.task for job in waiting}}
    for number, job in enumerate(waiting, start=1):
        record = train(TASKS[job.task], samples[job.task], job)
        records[_key(record)] = record
        if hvd.rank() == 0:
            content = {"ranks": hvd.size(), "versions": versions(), "records": list(records.values())}
            write_json(path, content)
            print(f"{number}/{len(waiting)} {summary(record)}", flush=True)


def read(path: Path) -> dict[tuple[str, str, int], Record]:
    """The records of an earlier call, by task, run and seed; none where there was none."""
    records = json.loads(path.read_text())["records"] if path.exists() else []
    return {_key(record): record for record in records}


def _key(record: Record) -> tuple[str, str, int]:
    return record["task"], record["run"], record["seed"]


def summary(record: Record) -> str:
    """A run's outcome in one line."""
    outcome = "diverged" if record["final"] is None else f"{record['metric']} {record['final']:.4g}"
    return (
        f"{record['task']} {record['run']} seed {record['seed']}: {outcome}, {record['bytes_sent'] / 1e6:.3f} MB sent, "
        f"{record['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()

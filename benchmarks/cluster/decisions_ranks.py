"""Turns of the decisions benchmark on each rank under mpirun; benchmarks.cluster.decisions starts this program."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.cluster.contenders import FP16, HOROVOD, POWERSGD
from benchmarks.cluster.stepping import Training, slowest
from benchmarks.convergence.runs import FASHION, STDLIB, Job, Run
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import train

_TASKS = {"cnn": FASHION, "transformer": STDLIB}
_SPECS = {HOROVOD: "none", FP16: "fp16", POWERSGD: "powersgd:rank=4"}


def accuracy(model: str, contender: str, count: int, seed: int, fashion_mnist: str) -> dict[str, Any]:
    """Train a model on data, and return the metric at the end; None if the training diverged."""
    hvd.init()
    from mpi4py import MPI  # after Horovod, which then ends MPI

    from horovod_sparse.transport.mpi import MPITransport

    torch.set_num_threads(1)
    task = TASKS[_TASKS[model]]
    made = Run(contender, "decisions", _SPECS.get(contender, contender))
    job = Job(task.name, made, seed, count, hvd.size())
    record = train(task, task.load(Path(fashion_mnist)), job, MPITransport(MPI.COMM_WORLD))
    return {"metric": record["metric"], "final": record["final"], "seconds": record["seconds"]}


def change(model: str, contender: str, folder: str, count: int, settled: int, rates: int) -> list[dict[str, Any]]:
    """Train at several rates in turn, and return for each when it was decided, and density and step time at its end."""
    training, found = Training(model, contender), []
    for number in range(rates):
        if hvd.rank() == 0:
            (Path(folder) / f"ready{number}").touch()
            while not (Path(folder) / f"go{number}").exists():
                time.sleep(0.02)
        slowest(0.0)  # waits for rank 0
        times, densities, decided = [], [], []
        for step in range(count):
            times.append(training.step())
            counted = training.optimizer.statistics()
            densities.append(counted["total/density"])
            if counted.get("total/decisions"):
                decided.append(step)
        milliseconds = slowest(1e3 * median(times[-settled:]))
        found.append({"decided": decided, "density": median(densities[-settled:]), "milliseconds": milliseconds})
    return found

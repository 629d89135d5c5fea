"""Turns of the decisions benchmark on each rank under mpirun; benchmarks.cluster.decisions starts this program."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks import print_on_rank_0
from benchmarks.cluster.contenders import FP16, HOROVOD, PEERS, POWERSGD
from benchmarks.cluster.decisions_report import PRESET
from benchmarks.cluster.stepping import Training, mean, slowest
from benchmarks.convergence.runs import FASHION, STDLIB, Job, Run
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import train

_SECONDS = 20.0  # of timed steps per turn, at most; and of those before them
_WARMUP, _TRIALS = 15, 130
_TASKS = {"cnn": FASHION, "transformer": STDLIB}
_SPECS = {HOROVOD: "none", FP16: "fp16", POWERSGD: "powersgd:rank=4"}


def steps(model: str, contender: str, most: int) -> dict[str, Any]:
    """Return the median milliseconds of a step on the slowest rank, what was decided, and how much was exposed.

    ``exposed`` is the mean over the ranks of the milliseconds of the exchange after the last gradient, None if the
    contender does not count them.
    """
    training = Training(model, contender)
    first = max(training.step() for _ in range(2))
    possible = max(1, int(_SECONDS / slowest(first)))
    decided = None
    for number in range(2, _TRIALS if contender == PRESET else min(_WARMUP, possible)):
        training.step()
        if contender == PRESET and training.optimizer.statistics().get("total/decisions"):
            decided = number
    if contender not in PEERS:
        training.optimizer.statistics()  # of the steps so far
    times = [training.step() for _ in range(most if contender == PRESET else min(most, possible))]
    found = {"milliseconds": slowest(1e3 * median(times)), "density": 1.0, "exposed": None, "decided": decided}
    if contender not in PEERS:
        counted = training.optimizer.statistics()
        found["density"] = counted["total/density"]
        found["exposed"] = mean(1e3 * counted["total/seconds_exposed"] / len(times))
    return found


def accuracy(model: str, contender: str, count: int, seed: int, fashion_mnist: Path) -> dict[str, Any]:
    """Train a model on data, and return the metric at the end; None if the training diverged."""
    hvd.init()
    from mpi4py import MPI  # after Horovod, which then ends MPI

    from horovod_sparse.transport.mpi import MPITransport

    torch.set_num_threads(1)
    task = TASKS[_TASKS[model]]
    made = Run(contender, "decisions", _SPECS.get(contender, contender))
    job = Job(task.name, made, seed, count, hvd.size())
    record = train(task, task.load(fashion_mnist), job, MPITransport(MPI.COMM_WORLD))
    return {"metric": record["metric"], "final": record["final"], "seconds": record["seconds"]}


def change(model: str, contender: str, folder: Path, count: int, settled: int, rates: int) -> list[dict[str, Any]]:
    """Train at several rates in turn, and return for each when it was decided, and density and step time at its end."""
    training, found = Training(model, contender), []
    for number in range(rates):
        if hvd.rank() == 0:
            (folder / f"ready{number}").touch()
            while not (folder / f"go{number}").exists():
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


if __name__ == "__main__":
    _kind, _model, _contender, *_rest = sys.argv[1:]
    _kinds: dict[str, Callable[[], Any]] = {
        "steps": lambda: steps(_model, _contender, int(_rest[0])),
        "accuracy": lambda: accuracy(_model, _contender, int(_rest[0]), int(_rest[1]), Path(_rest[2])),
        "change": lambda: change(_model, _contender, Path(_rest[0]), *map(int, _rest[1:])),
    }
    print_on_rank_0(_kinds[_kind]())

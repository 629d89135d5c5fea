"""Training steps that the benchmarks time on every rank: a model, and a contender that exchanges its gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

import horovod_sparse as hvs
from benchmarks import power_sgd
from benchmarks.cluster.contenders import ALONE, FP16, HOROVOD, PEERS, POWERSGD
from benchmarks.convergence.tasks.images import fashion_cnn
from benchmarks.convergence.tasks.text import STDLIB_VOCABULARY, WINDOW, stdlib_transformer
from horovod_sparse.schedules import Measured

_SECONDS = 20.0  # of timed steps per turn, at most; and of those before them
_WARMUP, _TRIALS = 15, 130  # steps before the timed ones; more where the density is measured in the training


class Model(NamedTuple):
    """A model, and a function that makes inputs and targets for a number of samples."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int  # per rank and step


def _wide() -> nn.Module:
    """Return a network of 25 million parameters that computes little."""
    hidden = [nn.Sequential(nn.Linear(2240, 2240), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*hidden, nn.Linear(2240, 10))


MODELS = {
    "cnn": Model(fashion_cnn, lambda count: (torch.randn(count, 1, 28, 28), torch.randint(10, (count,))), 32),
    "transformer": Model(
        stdlib_transformer,
        lambda count: (
            torch.randint(STDLIB_VOCABULARY, (count, WINDOW)),
            torch.randint(STDLIB_VOCABULARY, (count, WINDOW)),
        ),
        4,
    ),
    "wide": Model(_wide, lambda count: (torch.randn(count, 2240), torch.randint(10, (count,))), 8),
}


class Training:
    """Training of a model on random data with one contender, under mpirun.

    Each rank is bound to one core, as ranks of a cluster are: if four ranks wander over two cores, three of them at
    times share one, and steps take half as long again.

    Args:
        model: Name of the model.
        contender: One of the peers of ``contenders``, or a configuration of ours.
        samples: Samples per rank and step; None: the model's own number.

    Attributes:
        optimizer: The optimizer, ours if the contender is a configuration.
    """

    def __init__(self, model: str, contender: str, samples: int | None = None) -> None:
        hvd.init()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[hvd.rank() % len(cores)]})
        torch.set_num_threads(1)
        torch.manual_seed(hvd.rank())
        made = MODELS[model]
        self._model = made.make()
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        named = list(self._model.named_parameters())
        if contender == POWERSGD:
            self._model, _ = power_sgd(self._model)
        wrappers: dict[str, Callable[[], Any]] = {
            ALONE: lambda: plain,
            POWERSGD: lambda: plain,
            HOROVOD: lambda: hvd.DistributedOptimizer(plain, named),
            FP16: lambda: hvd.DistributedOptimizer(plain, named, hvd.Compression.fp16),
        }
        ours = lambda: _ours(plain, named, *contender.split(" / "))  # noqa: E731
        self.optimizer = wrappers.get(contender, ours)()
        self._inputs, self._targets = made.batch(samples or made.samples)
        self._flag = torch.zeros(1) if contender == ALONE else None

    def step(self) -> float:
        """Train one step and return its seconds on this rank."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        outputs = self._model(self._inputs).flatten(0, -2)
        F.cross_entropy(outputs, self._targets.flatten()).backward()  # type: ignore[no-untyped-call]
        if self._flag is not None:
            hvd.allreduce_(self._flag, name="flag")
        self.optimizer.step()
        return time.perf_counter() - begin


def timed(model: str, contender: str, most: int, samples: int | None = None) -> dict[str, Any]:
    """Time steps of a new training; a collective call that returns the same on every rank.

    Args:
        model: Name of the model.
        contender: As for ``Training``.
        most: Number of timed steps; fewer if steps take long, except of local steps and of a measured density.
        samples: Samples per rank and step; None: the model's own number.

    Returns:
        ``milliseconds`` of the median step and ``mean`` of all on the slowest rank; of ours also ``kilobytes`` that a
        rank sends in a step, its ``density``, ``rounds`` of messages, milliseconds ``exposed`` of the exchange, for
        which the program waited, in the mean over the ranks, and the step in which the density was ``decided``.
    """
    training = Training(model, contender, samples)
    spec, *local = contender.split(" / ")
    ours = spec not in PEERS
    trials = ours and not local and isinstance(hvs.parse(spec).schedule, Measured.Options)
    possible = max(1, int(_SECONDS / slowest(max(training.step() for _ in range(2)))))
    decided = None
    # A whole round of local steps: its exchange connects the ranks.
    for number in range(2, int(local[0]) if local else _TRIALS if trials else min(_WARMUP, possible)):
        training.step()
        if trials and training.optimizer.statistics().get("total/decisions"):
            decided = number
    if ours:
        training.optimizer.statistics()  # of the steps so far
    before = training.optimizer.traffic.bytes_sent if ours else 0
    count = most if local or trials else min(most, possible)
    times = [training.step() for _ in range(count)]
    found = {"milliseconds": slowest(1e3 * median(times)), "mean": slowest(1e3 * fmean(times))}
    sent = mean((training.optimizer.traffic.bytes_sent - before) / 1e3 / count) if ours else None
    totals = training.optimizer.statistics() if ours else {}
    return {
        **found,
        "kilobytes": sent,
        "density": totals.get("total/density", 1.0),
        "rounds": totals["total/rounds"] / count if ours else None,
        "exposed": mean(1e3 * totals["total/seconds_exposed"] / count) if ours else None,
        "decided": decided,
    }


def _ours(plain: torch.optim.Optimizer, named: list[tuple[str, Any]], spec: str, *local: str) -> Any:
    """Return an optimizer that exchanges gradients, or takes local steps: their number, fragments and delay."""
    if not local:
        return hvs.DistributedOptimizer(plain, named, hvs.parse(spec))
    steps, fragments, delay = map(int, local if len(local) == 3 else (*local, "1", "0"))
    outer = hvs.OuterSGD(lr=1, momentum=0)
    return hvs.LocalOptimizer(plain, named, steps, hvs.parse(spec), outer, fragments=fragments, delay=delay)


def slowest(number: float) -> float:
    """Return the largest number of all ranks."""
    return float(hvd.allreduce(torch.tensor(number, dtype=torch.float64), op=hvd.Max, name="slowest"))


def mean(number: float) -> float:
    """Return the mean of a number over the ranks."""
    return float(hvd.allreduce(torch.tensor(number, dtype=torch.float64), op=hvd.Average, name="mean"))

"""Trains one configuration on one task and measures what it sends, keeps and reaches."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.optim.lr_scheduler import LambdaLR

import horovod_sparse as hvs
from benchmarks.convergence.runs import Job
from benchmarks.convergence.tasks import Samples, Task
from examples.schedule import learning_rate_factor
from horovod_sparse import trace

EVALUATIONS = 10
WARMUP = 0.1  # of the steps
_TEST_BATCH = 64

Record = dict[str, Any]


def train(task: Task, samples: tuple[Samples, Samples], job: Job) -> Record:
    """One run, up to the evaluation that shows that it diverged; a collective call.

    Args:
        task: The task.
        samples: Its training and test part.
        job: What to train, and for how long.

    Returns:
        The job's settings and the outcome. ``curve`` has a point for each evaluation (see ``measure``). Of the last
        one: ``final``, the metric, None where the run diverged; ``bytes_sent`` and ``entries_sent`` of a rank.
        ``residual_bytes``: see there. ``seconds``: of the whole run.
    """
    start = time.perf_counter()
    torch.manual_seed(job.seed)  # all ranks start from the same parameters
    trace.clear()
    model = task.build()
    optimizer, scheduler = build_optimizer(task, job, model)
    every = max(1, job.steps // EVALUATIONS)
    curve: list[dict[str, float]] = []
    train_losses: list[float] = []
    order = batches(len(samples[0]), task.batch, job.seed)
    for step, batch in enumerate(itertools.islice(order, job.steps), start=1):
        train_losses.append(train_step(model, optimizer, *samples[0][batch]))
        scheduler.step()
        if step % every == 0 or step == job.steps:
            point = measure(task.metric, model, optimizer, samples[1], float(np.mean(train_losses)), step)
            if not math.isfinite(point["train_loss"] + point["value"]):
                break
            curve.append(point)
            train_losses.clear()
    last = curve[-1] if curve else {"step": 0, "bytes_sent": 0.0, "entries_sent": 0.0}
    record = {
        **job.settings(),
        "metric": task.metric,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "final": last["value"] if last["step"] == job.steps else None,
        "bytes_sent": last["bytes_sent"],
        "entries_sent": last["entries_sent"],
        "residual_bytes": residual_bytes(optimizer),
        "curve": curve,
        "seconds": time.perf_counter() - start,
    }
    del model, optimizer, scheduler
    gc.collect()  # they hold each other, and the optimizer a thread
    return record


def build_optimizer(task: Task, job: Job, model: nn.Module) -> tuple[Any, LambdaLR]:
    """The optimizer that exchanges the gradients as the job's configuration says, and its learning rate."""
    compression = hvs.parse(job.run.spec)
    if isinstance(compression, hvs.Sparse):
        compression = replace(compression, dense_below=0, bucket_bytes=task.bucket_bytes)
    sgd = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=job.run.momentum)
    optimizer = hvs.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), compression=compression)
    warmup = round(WARMUP * job.steps)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor("cosine", step, warmup, job.steps))


def batches(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """This rank's batches without end: each epoch in a new order, in which every sample belongs to one rank.

    Args:
        count: Number of samples.
        batch: Samples of a rank and step.
        seed: Of the order; it is the same on all ranks.
    """
    ranks, rank = hvd.size(), hvd.rank()
    random = np.random.default_rng(seed)
    while True:
        steps = count // (batch * ranks)
        order = random.permutation(count)[: steps * batch * ranks]
        yield from order.reshape(steps, ranks, batch)[:, rank].tolist()


def train_step(model: nn.Module, optimizer: Any, inputs: Tensor, labels: Tensor) -> float:
    """One update; returns this rank's mean loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def measure(
    metric: str, model: nn.Module, optimizer: Any, test: Samples, train_loss: float, step: int
) -> dict[str, float]:
    """A point of the learning curve; a collective call, the same result on every rank.

    Args:
        metric: ``accuracy`` or ``perplexity``.
        model: The model.
        optimizer: Its optimizer.
        test: The test part, of which each rank computes a share.
        train_loss: This rank's mean loss since the last point.
        step: Steps so far.

    Returns:
        ``step``; ``value``, the metric on the whole test part; ``train_loss``, ``bytes_sent`` and ``entries_sent`` so
        far, mean of the ranks.
    """
    mine = [*evaluate(model, test), train_loss, *traffic(model, optimizer, step)]
    sums = hvd.allreduce(torch.tensor(mine, dtype=torch.float64), op=hvd.Sum, name="measure")
    loss, correct, count = sums[:3]
    value = correct / count if metric == "accuracy" else torch.exp(loss / count)
    if not torch.isfinite(loss):
        value = loss  # an accuracy would not show it
    names = ("train_loss", "bytes_sent", "entries_sent")
    return {"step": step, "value": value.item(), **dict(zip(names, (sums[3:] / hvd.size()).tolist(), strict=True))}


@torch.no_grad()
def evaluate(model: nn.Module, test: Samples) -> tuple[float, int, int]:
    """Sum of the losses, number of right answers and number of answers over this rank's share of the test part."""
    model.eval()
    share = range(hvd.rank(), len(test), hvd.size())
    loss, correct, count = 0.0, 0, 0
    for start in range(0, len(share), _TEST_BATCH):
        inputs, labels = test[share[start : start + _TEST_BATCH]]
        logits, labels = model(inputs).flatten(0, -2), labels.flatten()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        count += len(labels)
    model.train()
    return loss, correct, count


def traffic(model: nn.Module, optimizer: Any, steps: int) -> tuple[float, float]:
    """Bytes and gradient entries that this rank has sent so far.

    Horovod counts none: a ring allreduce, which sends the fewest bytes, sends 2 (P-1)/P of the gradients'.
    """
    if hasattr(optimizer, "traffic"):
        entries = sum(span.details["entries"] for span in trace.spans() if span.name == "exchange")
        return float(optimizer.traffic.bytes_sent), float(entries)
    entries = steps * sum(parameter.numel() for parameter in model.parameters())
    return 2 * (hvd.size() - 1) / hvd.size() * 4 * entries, float(entries)


def residual_bytes(optimizer: Any) -> int:
    """Bytes of the arrays that this rank's memories keep from one step to the next, over all buckets.

    It is what ``compression_state_dict`` holds of them. A memory that forgets keeps nothing, though the selection
    needs a scratch buffer of the bucket's size.
    """
    if not hasattr(optimizer, "compression_state_dict"):
        return 0
    return sum(_nbytes(bucket.get("memory")) for bucket in optimizer.compression_state_dict()["buckets"])


def _nbytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(_nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, Tensor) else 0

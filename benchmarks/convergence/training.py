"""Training of one configuration on one task, with its traffic, memory, times and learning curve."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence.exchanges import Exchange, exchange, fully_sharded
from benchmarks.convergence.runs import Job
from benchmarks.convergence.tasks import Samples, Task
from examples.schedule import learning_rate_factor
from horovod_sparse.transport.base import Transport

WARMUP = 0.1  # share of the steps
_TEST_BATCH = 250
# Stages of a step; see docs/watch.md.
STAGES = ("select", "agree", "exchange", "apply")

Record = dict[str, Any]


def train(
    task: Task, samples: tuple[Samples, Samples], job: Job, transport: Transport, model: nn.Module | None = None
) -> Record:
    """Train one run, which ends early at the first evaluation after it diverged; a collective call.

    In a simulation, the ranks are threads and ``model`` is the replica of this rank. Otherwise the model is built here,
    with torch's global generator.

    Returns:
        The job's settings and the outcome. ``curve`` has a point for each evaluation (see ``measure``), with the
        ``seconds`` that the steps took so far. ``final`` is the metric of the last point, None if the run diverged;
        ``bytes_sent`` and ``entries_sent`` are those of the last point. ``residual_bytes``: see ``Exchanged``.
        ``stages``: milliseconds per step in each of ``STAGES``, mean over the ranks. ``seconds``: time of all steps.
    """
    model = build(task, job) if model is None else model
    if job.run.gathered:
        fully_sharded(model)
    optimizers = optimizers_for(task, job, model)
    exchanged = exchange(model, optimizers, job.run, job.spec, task.bucket_bytes, transport)
    warmup = round(WARMUP * job.steps)
    # Steps, not a cosine: Accordion reacts to decays of the learning rate and must see one.
    factor = partial(learning_rate_factor, "step", warmup=warmup, steps=job.steps)
    schedulers = [LambdaLR(optimizer, factor) for optimizer in exchanged.optimizers]
    every = max(1, job.steps // task.evaluations)
    curve: list[dict[str, float]] = []
    losses: list[Tensor] = []
    seconds, since = 0.0, time.perf_counter()
    order = batches(len(samples[0]), job.batch or task.batch, job.seed, transport)
    for step, batch in enumerate(itertools.islice(order, job.steps), start=1):
        losses.append(train_step(exchanged, *samples[0][batch]))
        for scheduler in schedulers:
            scheduler.step()
        if job.run.local_steps and step == job.steps:
            for optimizer in exchanged.optimizers:
                optimizer.synchronize()  # the last round may be shorter; until here, ranks differ
        if step % every == 0 or step == job.steps:
            seconds += time.perf_counter() - since
            loss = torch.stack(losses).mean().item()
            point = measure(task.metric, model, exchanged, samples[1], loss, step, transport)
            if not math.isfinite(point["train_loss"] + point["value"]):
                break
            curve.append({**point, "seconds": seconds})
            losses.clear()
            since = time.perf_counter()
    last = curve[-1] if curve else {"step": 0, "bytes_sent": 0.0, "entries_sent": 0.0}
    record = {
        **job.settings(),
        "ranks": transport.size,
        "metric": task.metric,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "final": last["value"] if last["step"] == job.steps else None,
        "bytes_sent": last["bytes_sent"],
        "entries_sent": last["entries_sent"],
        "residual_bytes": exchanged.residual_bytes(),
        "stages": stages(exchanged, step, transport),
        "digest": digest(model),
        "curve": curve,
        "seconds": round(seconds, 1),
    }
    del model, exchanged, optimizers, scheduler, schedulers
    gc.collect()  # they reference each other, and the optimizer owns a thread
    return record


def optimizers_for(task: Task, job: Job, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the plain optimizers of a run; they are fused, as separate passes would take a fifth of a step."""
    kind, decay, parameters = job.run.optimizer, task.weight_decay, list(model.parameters())
    lr = task.rates[kind] * job.run.rate_on(job.task)
    if kind == "adam":
        return [torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)]
    if kind == "muon":  # trains the matrices of the transformer's layers, AdamW everything else
        inner = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
        others = [p for p in parameters if all(p is not one for one in inner)]
        momentum, beta = (0.8, 0.6) if job.run.short else (0.95, 0.9)
        adam = torch.optim.AdamW(others, task.rates["adam"], (beta, 0.999), weight_decay=decay, fused=True)
        return [torch.optim.Muon(inner, lr=lr, momentum=momentum, weight_decay=decay), adam]
    momentum = 0.9 if kind in ("momentum", "nesterov") else 0.0
    return [torch.optim.SGD(parameters, lr, momentum, weight_decay=decay, nesterov=kind == "nesterov", fused=True)]


def batches(count: int, batch: int, seed: int, transport: Transport) -> Iterator[list[int]]:
    """Yield this rank's batches of sample numbers endlessly, in a new order in each epoch.

    Every sample belongs to one rank. The seed is the same on all ranks.
    """
    ranks, rank = transport.size, transport.rank
    random = np.random.default_rng(seed)
    while True:
        steps = count // (batch * ranks)
        order = random.permutation(count)[: steps * batch * ranks].reshape(steps, ranks, batch)[:, rank]
        yield from (mine.tolist() for mine in order)


def train_step(exchanged: Exchange, inputs: Tensor, labels: Tensor) -> Tensor:
    """Run one update and return this rank's mean loss."""
    for optimizer in exchanged.optimizers:
        optimizer.zero_grad()
    with exchanged.place():
        loss = F.cross_entropy(exchanged.forward(inputs).flatten(0, -2), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in exchanged.optimizers:
        optimizer.step()
    return loss.detach()


def measure(
    metric: str,
    model: nn.Module,
    exchanged: Exchange,
    test: Samples,
    train_loss: float,
    step: int,
    transport: Transport,
) -> dict[str, float]:
    """Return a point of the learning curve, the same on every rank; a collective call.

    Each rank evaluates a share of the test part. ``train_loss`` is the mean loss of this rank since the last point.

    Returns:
        ``step``; ``value``, the metric on the complete test part; ``train_loss``, ``bytes_sent`` and ``entries_sent``
        so far, means over the ranks.
    """
    mine = [*evaluate(model, test, transport), train_loss, *exchanged.traffic(step)]
    loss, correct, count, *others = transport.allreduce(np.array(mine, np.float64)).tolist()
    value = loss  # a loss that is not finite, which an accuracy would hide
    if math.isfinite(loss):
        value = correct / count if metric == "accuracy" else float(np.exp(loss / count))
    names = ("train_loss", "bytes_sent", "entries_sent")
    means = {name: total / transport.size for name, total in zip(names, others, strict=True)}
    return {"step": step, "value": value, **means}


@torch.no_grad()
def evaluate(model: nn.Module, test: Samples, transport: Transport) -> tuple[float, int, int]:
    """Return the sum of losses and the numbers of correct and of all answers on this rank's share of the test part."""
    model.eval()
    share = range(transport.rank, len(test), transport.size)
    loss, correct, count = 0.0, 0, 0
    # As many batches on every rank, as FSDP2 gathers the parameters for each.
    for batch in np.array_split(share, -(-len(test) // (transport.size * _TEST_BATCH))):
        inputs, labels = test[batch.tolist()]
        logits, labels = model(inputs).flatten(0, -2), labels.flatten()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        count += len(labels)
    model.train()
    return loss, correct, count


def stages(exchanged: Exchange, steps: int, transport: Transport) -> dict[str, float]:
    """Return the milliseconds per step in each stage of the pipeline, mean over the ranks; a collective call."""
    mine = np.array([exchanged.seconds(stage) for stage in STAGES])
    means = transport.allreduce(mine) / transport.size * 1e3 / steps
    return {stage: round(mean, 3) for stage, mean in zip(STAGES, means.tolist(), strict=True)}


def build(task: Task, job: Job) -> nn.Module:
    """Return the model with the parameters that all ranks start from."""
    torch.manual_seed(job.seed)
    return task.build()


def digest(model: nn.Module) -> str:
    """Return a digest of the bits of a model's parameters; a collective call if they are sharded."""
    content = hashlib.sha256()
    if isinstance(model, FSDPModule):
        model.reshard()  # FSDP2 leaves the outermost module gathered after a forward pass
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        content.update(whole.detach().numpy().tobytes())
    return content.hexdigest()[:16]

"""Measurement of one contender: times of the parts of a step, bytes sent, and memory."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.training_step.exchange import LEARNING_RATE, MOMENTUM, ModelExchange, configuration_of
from benchmarks.training_step.models import Workload
from horovod_sparse import metrics
from horovod_sparse.transport.base import Transport

# Parts of a step, and the spans of each. Time spent waiting for late ranks counts as communication.
PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "compression": ("select", "apply"),
    "communication": ("agree", "exchange"),
    "update": ("update",),
}


@dataclass(frozen=True)
class Measurement:
    """Result of one contender on this rank.

    Attributes:
        ms: Milliseconds of the parts, of the whole step, and without overlap of the rest: median, and quartiles.
        kilobytes_sent: Sent by this rank per step.
        peak_mib: Most memory that torch has allocated, including parameters; None on the CPU.
    """

    ms: dict[str, tuple[float, float, float]]
    kilobytes_sent: float
    peak_mib: float | None


def measure(options: argparse.Namespace, transport: Transport, contender: str) -> Measurement:
    """Train with one contender and return the times of the steps after the warm-up; a collective call."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    workload = Workload(options.model, options.batch, options.length, device)
    sparse = configuration_of(contender, options.density)
    exchange = None if sparse is None else ModelExchange(sparse, workload.model, transport, options.overlap)
    # Applied before the selection or by the optimizer, not by both.
    momentum = 0.0 if sparse is not None and sparse.momentum is not None else MOMENTUM
    optimizer = torch.optim.SGD(workload.model.parameters(), LEARNING_RATE, momentum, foreach=True)
    metrics.enable(device=torch.cuda if on_gpu else None)
    steps = [_step(workload, exchange, optimizer, transport, on_gpu) for _ in range(options.warmup + options.steps)]
    metrics.enable(False)
    metrics.clear()
    sent = 0.0
    if exchange is not None:
        exchange.close()
        sent = exchange.bytes_sent / len(steps) / 1e3
    measured = steps[options.warmup :]
    if not options.overlap:
        measured = [step | {"rest": step["step"] - sum(step[part] for part in PARTS)} for step in measured]
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    return Measurement({part: _spread([step[part] for step in measured]) for part in measured[0]}, sent, peak)


def _step(
    workload: Workload,
    exchange: ModelExchange | None,
    optimizer: torch.optim.Optimizer,
    transport: Transport,
    on_gpu: bool,
) -> dict[str, float]:
    """Run one step, which all ranks begin together, and return the milliseconds of the step and of its parts."""
    metrics.clear()
    if on_gpu:
        torch.cuda.synchronize()
    transport.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    with metrics.span("forward"):
        loss = workload.loss()
    with metrics.span("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    if exchange is not None:
        exchange.complete()
    with metrics.span("update"):
        optimizer.step()
    if exchange is not None:
        exchange.finish()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    totals = metrics.totals()
    parts = {part: 1e3 * sum(totals.get(span, 0.0) for span in spans) for part, spans in PARTS.items()}
    return {"step": 1e3 * seconds, **parts}


def _spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the lower and upper quartile."""
    median, low, high = np.percentile(values, (50, 25, 75)).tolist()
    return median, low, high

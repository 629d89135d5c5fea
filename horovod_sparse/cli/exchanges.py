"""Timing and verification of the exchange of one bucket, for `horovod-sparse bench collectives`.

It runs the pipeline used in training, whose spans give the time of each stage. NumPy and MPI are imported only where
they are used, because the command line must start without them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_sparse import metrics

if TYPE_CHECKING:
    from horovod_sparse.config import Sparse
    from horovod_sparse.kernels.types import Array
    from horovod_sparse.transport.base import Transport

SPANS = ("step", "select", "agree", "exchange", "apply")

_WINDOWS = 8  # number of gradients
_SHIFT = 1 << 10  # elements between the starts of two gradients in the buffer
_CHUNK = 1 << 20  # elements verified at a time


@dataclass(frozen=True)
class Row:
    """Result of one algorithm at one size and density, per step from the gradients to their average.

    Times are medians over the iterations, in milliseconds. The time of a stage is that of its fastest rank, which did
    not wait for others.

    Attributes:
        algorithm: Name of the preset.
        size: Number of elements of the dense vector.
        nbytes: Bytes of the dense vector.
        density: Configured density.
        min_ms: Time of the fastest rank.
        avg_ms: Time averaged over the ranks.
        max_ms: Time of the slowest rank.
        best_ms: Time of the slowest rank in the fastest iteration.
        select_ms: Checking for finite values, accumulating, selecting, and zeroing the gradient.
        agree_ms: The message by which the ranks agree on what to exchange.
        exchange_ms: The sparse allreduce.
        apply_ms: Adding returned entries to the residual, and writing the average into the gradient.
        algbw: Bytes of the dense vector divided by the time of the slowest rank, in GB/s.
        busbw: algbw * 2 (P-1)/P, which is the rate of each link in a dense ring allreduce.
        wire_bytes: Bytes sent per rank, averaged over the ranks.
        messages: Messages sent per rank, averaged over the ranks.
        entries: Entries submitted per rank in the last iteration, averaged over the ranks.
        total_entries: Nonzero elements of the last iteration's output.
        wrong: Elements of one extra step that violate conservation, plus the number of ranks whose output has other
            bits than that of rank 0; None if not checked.
    """

    algorithm: str
    size: int
    nbytes: int
    density: float
    min_ms: float
    avg_ms: float
    max_ms: float
    best_ms: float
    select_ms: float
    agree_ms: float
    exchange_ms: float
    apply_ms: float
    algbw: float
    busbw: float
    wire_bytes: float
    messages: float
    entries: float
    total_entries: int
    wrong: int | None


def windows(size: int, seed: tuple[int, int]) -> list[Array]:
    """Return float32 gradients with normally distributed elements, as overlapping views of one buffer to save memory.

    The seed contains the rank, so that gradients differ between ranks.
    """
    from numpy.random import default_rng

    buffer = default_rng(seed).standard_normal(size + _WINDOWS * _SHIFT, "float32")
    return [buffer[start : start + size] for start in range(0, _WINDOWS * _SHIFT, _SHIFT)]


class Bucket:
    """A bucket as in training: its pipeline replaces each gradient by the average over the ranks.

    The local gradients are used in turn and repeated.

    Attributes:
        pipeline: Pipeline of the bucket.
        gradient: Local gradient of the loaded step, unchanged.
        output: Buffer that holds a copy of the gradient before the step, and the average after it.
        entries: Number of entries that this rank submitted in the last step.
    """

    def __init__(self, sparse: Sparse, gradients: Sequence[Array], transport: Transport) -> None:
        from horovod_sparse.engine.pipeline import pipeline_for

        self.gradient, self.output, self.entries = gradients[0], gradients[0].copy(), 0
        self.pipeline = pipeline_for(sparse, self.output.size, self.output, transport, factor=1 / transport.size)
        self._gradients = itertools.cycle(gradients)

    def load(self) -> None:
        """Load the next gradient, as a backward pass does."""
        self.gradient = next(self._gradients)
        self.output[...] = self.gradient

    def run(self) -> list[float]:
        """Run a step on the loaded gradient; return the milliseconds of each of ``SPANS``."""
        segments = [(0, self.output)]
        metrics.clear()
        with metrics.span("step"):
            self.pipeline.run(segments, segments)
        self.entries = sum(span.details["entries"] for span in metrics.spans() if span.name == "exchange")
        seconds = metrics.totals()
        return [1e3 * seconds.get(name, 0.0) for name in SPANS]

    def residual(self) -> Array:
        """Return a copy of the residual; zeros if the configuration has no memory."""
        kept = list(self.pipeline.state_dict().get("memory", {}).values())
        copy: Array = kept[0].copy() if kept else 0 * self.output
        return copy


def measure(
    name: str,
    sparse: Sparse,
    gradients: Sequence[Array],
    transport: Transport,
    iterations: int,
    warmup: int,
    check: bool = True,
) -> Row:
    """Time one configuration; a collective call that returns the same row on all ranks.

    Each timed iteration starts with a barrier. In those of the warmup, reused thresholds settle. The check of one extra
    step takes a dense allreduce in float64.
    """
    import numpy as np

    metrics.enable()
    bucket = Bucket(sparse, gradients, transport)
    for _ in range(warmup):
        bucket.load()
        bucket.run()
    sent = [-bucket.pipeline.traffic.bytes_sent, -bucket.pipeline.traffic.messages_sent]
    mine = []
    for _ in range(iterations):
        bucket.load()
        transport.barrier()
        mine.append(bucket.run())
    sent = [sent[0] + bucket.pipeline.traffic.bytes_sent, sent[1] + bucket.pipeline.traffic.messages_sent]
    nonzero = int(np.count_nonzero(bucket.output))
    wire, messages, entries = (
        np.mean(transport.allgather_object([*sent, bucket.entries * iterations]), axis=0) / iterations
    )
    mistakes = wrong(transport, bucket) if check else None
    metrics.enable(False)
    times = np.array(transport.allgather_object(mine))  # shape: ranks, iterations, SPANS
    least, steps = dict(zip(SPANS, np.median(times.min(axis=0), axis=0).tolist(), strict=True)), times[..., 0]
    slowest = float(np.median(steps.max(axis=0)))
    ranks, nbytes = len(times), bucket.output.nbytes
    algbw = nbytes / slowest / 1e6
    return Row(
        algorithm=name,
        size=bucket.output.size,
        nbytes=nbytes,
        density=sparse.density,
        min_ms=least.pop("step"),
        avg_ms=float(np.median(steps.mean(axis=0))),
        max_ms=slowest,
        best_ms=float(steps.max(axis=0).min()),
        **{f"{stage}_ms": milliseconds for stage, milliseconds in least.items()},
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        wire_bytes=float(wire),
        messages=float(messages),
        entries=float(entries),
        total_entries=nonzero,
        wrong=mistakes,
    )


def wrong(transport: Transport, bucket: Bucket) -> int:
    """Run one step and count its errors; a collective call that returns the same number on all ranks.

    Returns:
        The number of elements where the sum over the ranks of old residual + gradient - new residual, in float64,
        differs from P times the output by more than float32 rounding; plus the number of ranks whose output has other
        bits than that of rank 0.
    """
    before = bucket.residual()
    bucket.load()
    bucket.run()
    after, ranks, different = bucket.residual(), transport.size, 0
    # Rounding occurs in each rank's accumulator, in P - 1 partial sums and in the average. None of them is larger than
    # the sum of the ranks' largest magnitudes.
    largest = float(abs(before).max(initial=0) + abs(bucket.gradient).max(initial=0))
    tolerance = (ranks + 2) * 2.0**-23 * sum(transport.allgather_object(largest))
    for begin in range(0, after.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        delivered = before[part].astype("float64") + bucket.gradient[part] - after[part]
        total = transport.allreduce(delivered)
        agrees = abs(total - ranks * bucket.output[part].astype("float64")) <= tolerance  # false for NaN
        different += int((~agrees).sum())
    digests = transport.allgather_object(hashlib.sha256(bucket.output.tobytes()).digest())
    worst: int = max(transport.allgather_object(different)) + sum(digest != digests[0] for digest in digests)
    return worst

"""Times and verifies the exchange of one bucket: the measurement behind `horovod-sparse bench collectives`.

The pipeline is the one of a training, and its spans tell the stages apart. NumPy and MPI are loaded only where they are
used: the command line must start without them.
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

_WINDOWS = 8  # different gradients
_SHIFT = 1 << 10  # elements from one to the next
_CHUNK = 1 << 20  # elements that are verified at a time


@dataclass(frozen=True)
class Row:
    """One algorithm at one size and density; per step, from the gradients to the averaged gradient.

    Times are medians over the iterations. A stage's is that of the rank that took least: it waited for nobody.

    Attributes:
        algorithm: Name of the preset.
        size: Elements of the dense vector.
        nbytes: Bytes of the dense vector.
        density: That of the configuration.
        min_ms: Milliseconds of the fastest rank.
        avg_ms: Mean of the ranks.
        max_ms: Milliseconds of the slowest rank.
        best_ms: Milliseconds of the slowest rank in the fastest iteration.
        select_ms: Of it, testing for finite values, accumulating, selecting, and leaving zeros in the gradient.
        agree_ms: The message that settles with the other ranks what is exchanged.
        exchange_ms: The sparse allreduce.
        apply_ms: Putting back what returned, and writing the average into the gradient.
        algbw: Bytes of the dense vector per time of the slowest rank, in GB/s.
        busbw: algbw * 2 (P-1)/P, which for a dense ring is the rate of each link.
        wire_bytes: Bytes that a rank sends, mean of the ranks.
        messages: Messages that a rank sends, mean of the ranks.
        entries: Entries that a rank hands in, in the last iteration, mean of the ranks.
        total_entries: Elements of the last iteration's output that are not zero.
        wrong: Elements of one more step that break the law of conservation, plus ranks that hold other bits; None where
            this was not checked.
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
    """A few float32 gradients of normally distributed elements: parts of one buffer, which hardly costs memory.

    Args:
        size: Elements of a gradient.
        seed: Seed and rank; every rank has others.
    """
    from numpy.random import default_rng

    buffer = default_rng(seed).standard_normal(size + _WINDOWS * _SHIFT, "float32")
    return [buffer[start : start + size] for start in range(0, _WINDOWS * _SHIFT, _SHIFT)]


class Bucket:
    """A bucket of a training that averages, and its gradients; the average takes the gradient's place.

    Args:
        sparse: The configuration.
        gradients: This rank's, one after the other and again from the start.
        transport: The communicator of all ranks.

    Attributes:
        pipeline: Its pipeline.
        gradient: The next or last step's gradient, as it was handed in.
        output: Takes it, and what the pipeline makes of it.
        entries: What this rank handed in.
    """

    def __init__(self, sparse: Sparse, gradients: Sequence[Array], transport: Transport) -> None:
        from horovod_sparse.engine.pipeline import pipeline_for

        self.gradient, self.output, self.entries = gradients[0], gradients[0].copy(), 0
        self.pipeline = pipeline_for(sparse, self.output.size, self.output, transport, factor=1 / transport.size)
        self._gradients = itertools.cycle(gradients)

    def load(self) -> None:
        """Makes the next gradient ready, as a backward pass does."""
        self.gradient = next(self._gradients)
        self.output[...] = self.gradient

    def run(self) -> list[float]:
        """Takes the step of the gradient that is ready; gives its milliseconds and those of its stages."""
        segments = [(0, self.output)]
        metrics.clear()
        with metrics.span("step"):
            self.pipeline.run(segments, segments)
        self.entries = sum(span.details["entries"] for span in metrics.spans() if span.name == "exchange")
        seconds = metrics.totals()
        return [1e3 * seconds.get(name, 0.0) for name in SPANS]

    def residual(self) -> Array:
        """A copy of what the memory keeps, all zeros where there is none."""
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
    """Times one configuration; all ranks call this and get the same row.

    Args:
        name: What to call it.
        sparse: The configuration.
        gradients: This rank's gradients.
        transport: The communicator of all ranks.
        iterations: Timed iterations, at least 1; each begins with a barrier.
        warmup: Iterations before them, in which reused thresholds settle.
        check: Verify one more step, which takes a dense allreduce in float64.
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
    times = np.array(transport.allgather_object(mine))  # ranks, iterations, step and stages
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
    """Takes one step and counts what is wrong with it; all ranks call this and get the same number.

    Returns:
        The number of elements where the sum over the ranks of old residual + gradient - new residual, in float64, is
        not P times the output, beyond what rounding in float32 explains; plus the number of ranks whose output has
        other bits than that of rank 0.
    """
    before = bucket.residual()
    bucket.load()
    bucket.run()
    after, ranks, different = bucket.residual(), transport.size, 0
    # Rounded are each rank's accumulator, P - 1 partial sums and the average: none is larger than the sum of the ranks'
    # largest magnitudes.
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

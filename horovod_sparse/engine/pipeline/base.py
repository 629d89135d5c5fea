"""Parts that a sparse and a dense pipeline share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from horovod_sparse import metrics
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.metrics.counts import Counts, Stages
from horovod_sparse.rules import BucketContext, SparseVector
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic


class NoBackwardError(RuntimeError):
    """No rank had a backward pass in this step."""


class PipelineBase:
    """A bucket's place and messages, the stage in progress, and what both kinds of pipeline say and do.

    Args:
        context: The bucket and the rank.
        transport: Of the ranks that take part.
        factor: Factor on the totals.

    Attributes:
        stage: The stage in progress, or the last one; for messages.
        sent_whole: Whether everything was sent in the last step.
        counts: What was counted since the last ``statistics``.
    """

    def __init__(self, context: BucketContext, transport: Transport, factor: float) -> None:
        self._context = context
        self._transport = transport
        self._factor = factor
        self._kernels = kernels_for(context.like)
        self.stage = "select"
        self.sent_whole = True
        self.counts = Counts()
        self._stages = Stages()
        self._measuring = False  # norms are taken of the next step
        self._told = (0, 0)  # bytes sent and received up to the last ``statistics``

    def _stage(self, name: str, **details: Any) -> AbstractContextManager[None]:
        self.stage = name
        stages = self._stages
        stages.name = name
        stages.span = metrics.span(name, bucket=self._context.bucket, **details) if metrics.active() else None
        return stages

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received for this bucket."""
        return self._transport.traffic

    def statistics(self, norms: bool) -> Counts:
        """Counts since the last call; to be called between two steps.

        Args:
            norms: Whether those of the next step are taken, for the call after it.
        """
        counts, self.counts, self._measuring = self.counts, Counts(), norms
        counts.nanoseconds, self._stages.nanoseconds = self._stages.nanoseconds, counts.nanoseconds
        counts.events.update(self._context.events)
        self._context.events.clear()
        sent, received = self._told
        self._told = self.traffic.bytes_sent, self.traffic.bytes_received
        counts.bytes_sent, counts.bytes_received = self._told[0] - sent, self._told[1] - received
        share = 2 * (self._context.ranks - 1) / self._context.ranks
        counts.dense_bytes = counts.steps * share * self._context.size * self._context.like.itemsize
        return counts

    def _no_backward(self) -> NoBackwardError:
        return NoBackwardError(
            f"rank {self._context.rank}: step() or synchronize() without backward() on any of "
            f"{self._context.ranks} ranks: call loss.backward() first"
        )

    def _scatter(self, total: SparseVector, outputs: Segments, zeros: Segments = ()) -> None:
        """Writes factor * total into the outputs, of which some hold zeros already."""
        known = {id(array) for _, array in zeros}
        for cleared in (False, True):
            part = [pair for pair in outputs if (id(pair[1]) in known) == cleared]
            if part:
                self._kernels.scatter(total.indices, total.values, part, self._factor, cleared=cleared)

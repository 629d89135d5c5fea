"""Parts that a sparse and a dense pipeline share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from horovod_sparse import trace
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.mpi.messenger import Messenger
from horovod_sparse.rules import Place, SparseVector


class NoBackwardError(RuntimeError):
    """No rank had a backward pass in this step."""


class PipelineBase:
    """A bucket's place and messages, the stage in progress, and what both kinds of pipeline say and do.

    Args:
        place: The bucket and the rank.
        messenger: Of the ranks that take part.
        factor: Factor on the totals.

    Attributes:
        stage: The stage in progress, or the last one; for messages.
        sent_whole: Whether everything was sent in the last step.
    """

    def __init__(self, place: Place, messenger: Messenger, factor: float) -> None:
        self._place = place
        self._messenger = messenger
        self._factor = factor
        self._kernels = kernels_for(place.like)
        self.stage = "select"
        self.sent_whole = True

    def _stage(self, name: str, **details: Any) -> AbstractContextManager[None]:
        self.stage = name
        return trace.span(name, bucket=self._place.bucket, **details) if trace.recording else trace.NOTHING

    def _no_backward(self) -> NoBackwardError:
        return NoBackwardError(
            f"rank {self._place.rank}: step() or synchronize() without backward() on any of {self._place.ranks} ranks: "
            "call loss.backward() first"
        )

    def _scatter(self, total: SparseVector, outputs: Segments) -> None:
        self._kernels.scatter(total.indices, total.values, outputs, self._factor)

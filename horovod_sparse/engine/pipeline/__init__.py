"""One bucket's way from gradients to the averaged gradient: the only room that calls more than one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline.dense import DensePipeline
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.cores import own_cores
from horovod_sparse.transport.traffic import Traffic

__all__ = ["Pipeline", "pipeline_for"]


class Pipeline(Protocol):
    """One bucket's exchange; ``pipeline_for`` gives the one that a configuration asks for.

    Attributes:
        stage: The stage in progress, or the last one; for messages.
        sent_whole: Whether everything was sent in the last step.
        counts: What was counted since the last ``statistics``.
    """

    stage: str
    sent_whole: bool
    counts: Counts

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received for this bucket."""
        ...

    def facts(self, gradients: Segments, step: Step) -> NDArray[np.int64] | None:
        """Numbers that are summed over the ranks before the exchange; None: nothing has to be agreed on."""
        ...

    def run(
        self,
        gradients: Segments,
        outputs: Segments,
        step: Step = Step(),
        agreed: NDArray[np.int64] | None = None,
        ahead: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64] | None:
        """Exchanges one step's gradients.

        Args:
            gradients: This rank's gradients; positions in gaps are held (neither added to nor selected from).
            outputs: Written with factor * total, in their own dtypes; may be the gradients' own arrays, which saves
                a pass over them: where all are, the sweep leaves zeros in them, into which the total is written. An
                exchange that fails may leave them zero: what they held is in the memory then.
            step: Conditions of this step, by default the plain ones.
            agreed: Sums of this bucket's facts, where an earlier message brought them.
            ahead: Facts of another bucket, which a bucket that needs no agreement takes along in its message.

        Returns:
            The sums of the facts that were taken along.

        Raises:
            NoBackwardError: No rank had a backward pass. The memory is unchanged.
        """
        ...

    def statistics(self, norms: bool) -> Counts:
        """Counts since the last call; to be called between two steps.

        Args:
            norms: Whether those of the next step are taken, for the call after it.
        """
        ...

    def undo(self) -> None:
        """Goes back to the state before the step that was exchanged last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on. Arrays are not copied: see ``rules.snapshot``."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` of the same configuration and bucket."""
        ...

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state that goes on from those of another number of ranks.

        The sum of the memories over all ranks is what it was, as updates. State that is the same on all ranks comes
        from the leader. What belongs to one rank or to a number of ranks stays as it is here, usually new.

        Args:
            states: Those that this rank takes over, with NumPy arrays; there may be none.
            leader: The old rank 0's, in which the memory may be left out.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: A memory does not fit.
        """
        ...


def pipeline_for(
    sparse: Sparse,
    size: int,
    like: Array,
    transport: Transport,
    number: int = 0,
    factor: float = 1.0,
    undoable: bool = False,
    shared: dict[type[Any], Any] | None = None,
) -> Pipeline:
    """The pipeline of one bucket.

    Args:
        sparse: The configuration, the same on every rank.
        size: Elements n of the bucket.
        like: Array whose dtype (float32 or float64) and device the bucket takes.
        transport: Connects the ranks that take part; the pipeline counts its traffic on a channel of its own.
        number: The bucket's number, for traces and messages.
        factor: Factor on the totals: 1/P averages.
        undoable: Whether ``undo`` will be asked for: the state before every step is kept, which doubles a memory of
            the bucket's size.
        shared: What rules of all buckets of one model share; None: the bucket is alone.

    A collective call, which fails on all ranks where it fails on one.

    Raises:
        ValueError: An option does not fit a bucket of this size, or another rank could not make its part.
        Exception: This rank could not, for want of memory, say.
    """
    shared = {} if shared is None else shared
    ranks = transport.rank, transport.size, transport.channel().allreduce
    context = BucketContext(size, like[:0], number, *ranks, shared, undoable=undoable, threads=own_cores(transport))
    transport = transport.channel()
    if sparse.is_dense:
        return DensePipeline(context, transport, factor)
    made: SparsePipeline | Exception
    try:
        made = SparsePipeline(sparse, context, transport, factor)
    except Exception as error:
        made = error
    agree(transport, made if isinstance(made, Exception) else {})
    assert not isinstance(made, Exception)
    return made

"""Parts that the sparse and the dense pipeline share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any

from horovod_sparse import metrics
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.rules import BucketContext, Conditions, SparseVector
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic


class NoBackwardError(RuntimeError):
    """No rank had a backward pass in this step."""


class Pipeline:
    """Exchange of one bucket, step by step; ``pipeline_for`` returns the kind that a configuration needs.

    Args:
        context: The bucket and the rank.
        transport: The ranks that take part.
        factor: Factor on the totals; 1/P averages.

    Attributes:
        stage: The stage in progress, or the last one; read by other threads for reports.
        counts: Counts since the last call of ``statistics``.
        factor: Factor on the totals; 1/P averages.
        sample: Some entries of the sum that the last step has delivered; None after a dense step, or one with a
            learning rate of 0.
        changed: Whether the last exchange has changed the memory.
        steps: Number of steps that the memory holds, without those that were sent dense for a gradient that was not
            finite.
    """

    sample: SparseVector | None = None
    changed = False
    steps = 0

    def __init__(self, context: BucketContext, transport: Transport, factor: float) -> None:
        self._context = context
        self._transport = transport
        self.factor = factor
        self._kernels = kernels_for(context.like)
        self.stage = "select"
        self.counts = Counts()
        self._since = 0  # ns; start of the stage in progress; 0: none
        self._span: AbstractContextManager[None] | None = None
        self._traced = False  # as of the first stage of the step
        self._measuring = False  # norms of the next step are taken
        self._reported = Traffic()  # up to the last call of `statistics`
        self._rounds = 0  # up to that call, too

    def run(
        self, gradients: Segments, outputs: Segments, conditions: Conditions = Conditions(), resumes: bool = False
    ) -> None:
        """Exchange the gradients of one step.

        Args:
            gradients: Gradients of this rank. Positions in gaps are held: neither added to nor selected from; an
                owner of sums adds what others send there.
            outputs: Arrays that receive factor * total, in their own dtypes. They may be the arrays of the gradients,
                which saves a pass: the sweep then leaves zeros in them, into which the total is written. After a
                failed exchange they may be zero; the memory then holds what they held.
            conditions: Conditions of the step.
            resumes: Whether the gradients were added to the result of the last exchange, which the optimizer has not
                applied.

        Raises:
            NoBackwardError: No rank had a backward pass. The memory is unchanged.
        """
        try:
            self._run(gradients, outputs, conditions, resumes)
        finally:
            self._leave()

    def _run(self, gradients: Segments, outputs: Segments, conditions: Conditions, resumes: bool) -> None:
        raise NotImplementedError

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received for this bucket."""
        return self._transport.traffic

    @property
    def rounds(self) -> int:
        """Rounds of messages so far."""
        return self.traffic.rounds

    def statistics(self, norms: bool) -> Counts:
        """Return the counts since the last call; to be called between two steps.

        Args:
            norms: Take norms in the next step, for the call after it.
        """
        counts, self.counts, self._measuring = self.counts, Counts(), norms
        counts.events.update(self._context.events)
        self._context.events.clear()
        before, now = self._reported, self.traffic
        counts.bytes_sent = now.bytes_sent - before.bytes_sent
        counts.bytes_received = now.bytes_received - before.bytes_received
        counts.rounds, self._rounds = self.rounds - self._rounds, self.rounds
        self._reported = Traffic()
        self._reported.add(now)
        share = (1 if self._context.scatters else 2) * (self._context.ranks - 1) / self._context.ranks
        counts.dense_bytes = counts.steps * share * self._context.size * self._context.like.itemsize
        return counts

    def _enter(self, stage: str, **details: Any) -> None:
        """Enter a stage of the step, and leave the one before it."""
        now = perf_counter_ns()
        if self._since:
            self.counts.nanoseconds[self.stage] += now - self._since
        else:
            self._traced = metrics.active()
        self._since, self.stage = now, stage
        if self._traced:
            if self._span is not None:
                self._span.__exit__(None, None, None)
            self._span = metrics.span(stage, bucket=self._context.bucket, **details)
            self._span.__enter__()

    def _leave(self) -> None:
        if self._since:
            self.counts.nanoseconds[self.stage] += perf_counter_ns() - self._since
        self._since = 0
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _no_backward(self) -> NoBackwardError:
        return NoBackwardError(
            f"rank {self._context.rank}: step() or synchronize() without backward() on any of "
            f"{self._context.ranks} ranks: call loss.backward() first"
        )

    def _scatter(self, total: SparseVector, outputs: Segments, cleared: bool = False) -> None:
        """Write factor * total into outputs, which hold zeros already where they are cleared."""
        self._kernels.scatter(total.indices, total.values, outputs, self.factor, cleared=cleared)

    # State between steps, of which a pipeline without a memory has none.

    def forget(self) -> None:
        """Forget the state before the last step: until the next one begins, there is nothing to undo."""

    def undo(self) -> None:
        """Return to the state before the last step."""

    def reset(self) -> None:
        """Return to the state of a new pipeline; a collective call."""

    def replace_momentum(self) -> None:
        """Note that the optimizer's momentum has been replaced, unless this pipeline has loaded a state that fits it.

        The velocity is dropped. In the next step all ranks learn of it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on. Arrays are not copied: see ``rules.snapshot``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned for the same configuration and bucket; other keys are ignored.

        Raises:
            ValueError: A part is missing, of another type or size, not finite, or out of range. The pipeline keeps its
                state.
        """

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size.

        The sum of the memories over all ranks stays the same, as updates. State that is equal on all ranks is taken
        from the leader. State that depends on the rank or the world size starts from scratch.

        Args:
            states: States that this rank takes over, with NumPy arrays; may be empty.
            leader: The state of the old rank 0, in which the memory may be left out.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: A memory does not fit.
        """
        del states, leader
        return {}, []

"""Exchange of the gradients of one model, for any front end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.engine.layout import Layout, Member, bucket_bytes_for, plan
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.metrics.counts import statistics
from horovod_sparse.rules import Conditions
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic

_CALL = "construction of buckets"  # for reports of stalls


def require_state(state: Any) -> None:
    """Raise ValueError unless an object is a state of an exchange."""
    if not isinstance(state, Mapping) or "buckets" not in state:
        found = f"keys {sorted(map(str, state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"rank {process.job.rank}: this is no state of an exchange, but has {found}: load what "
            "compression_state_dict() of the optimizer, or state_dict() of the SparseState, has returned"
        )


def statistics_of(exchanges: Iterable[Exchange], norms: bool) -> dict[str, float]:
    """Return statistics as ``Exchange.statistics``; buckets are numbered over all of several exchanges."""
    buckets = [bucket for exchange in exchanges for bucket in exchange.worker.buckets]
    return statistics({number: bucket.pipeline.statistics(norms) for number, bucket in enumerate(buckets)})


class Exchange:
    """Buckets of one model, the worker that exchanges them, and their state.

    Args:
        sparse: The configuration.
        transport: The ranks that take part; used by this exchange only. A single rank exchanges nothing.
        factor: Factor on the totals; 1/P averages.
        stall: Limits of the wait for a bucket.
        grad_scaler: The scaler that multiplies the loss.
        undoable: Whether a step can be dropped; it always can with a grad_scaler.
        hold_zeros: Whether a gradient of zeros only means that its parameter took no part in the step.
        adaptive: Whether an optimizer is adaptive, as in ``BucketContext``.
        total_norm: Returns the norm of a model's gradients from that of the gradients on this rank, on the worker
            thread; by default they are the same.
        admit: Creates a bucket for gradients by their keys, where they have none; a collective call. By default, there
            are no gradients without a bucket.

    Attributes:
        compression: The configuration.
        transport: The ranks that take part.
        ranks: World size P.
        factor: Factor on the totals.
        worker: Takes the gradients.
        groups: Number of the param group of each gradient, by its key.
        delivered: What was delivered of each gradient that is selected from, by its key.
        scaled: Whether a grad_scaler multiplies the loss.
        undoable: Whether a step can be dropped.
        epoch: The epoch that the script has set; None: none so far.
        idle: Whether this rank has no backward pass in the step in progress.
    """

    def __init__(
        self,
        sparse: Sparse,
        transport: Transport,
        factor: float,
        stall: Limits,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        undoable: bool = False,
        hold_zeros: bool = False,
        adaptive: bool = False,
        total_norm: Callable[[float], float] = float,
        admit: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self.compression = sparse
        self.transport = transport
        self.ranks = transport.size  # a rank that leaves ends MPI: not to be read later
        self.scaled = grad_scaler is not None and grad_scaler.is_enabled()
        self.undoable = undoable or self.scaled
        self.epoch: int | None = None
        self.idle = False
        self._admit = admit
        self.factor = factor
        self.groups: dict[str, int] = {}
        self.delivered: dict[str, Delivered] = {}
        self._settings = Settings(sparse, factor, self.undoable, hold_zeros, adaptive=adaptive)
        self._grad_scaler = grad_scaler
        self._shared: dict[type[Any], Any] = {}  # state that the rules of all buckets share
        momentum, ranks = sparse.momentum, transport.size

        def factor_for(norm: float) -> float:
            return float(momentum.clip(total_norm(norm), ranks))

        clips = momentum is not None and momentum.max_norm is not None
        me = weakref.proxy(self)  # without a cycle, threads and connections end with the last user of the exchange
        self.worker = Worker(lambda group: me._read(group), self.undoable, factor_for if clips else None)
        if self.ranks > 1 and transport.job is not None:  # ranks that are threads end together
            process.abort_on_error()
            with process.communicating(_CALL, transport):
                process.watch.add(transport, weakref.ref(self.worker), stall)

    def order(self, keys: list[str]) -> list[str]:
        """Return keys in the order of rank 0; a collective call."""
        with process.communicating(_CALL, self.transport):
            in_order: list[str] = self.transport.broadcast_object(keys)
        return in_order

    def add(self, members: Sequence[Member]) -> None:
        """Assign gradients to new buckets; a collective call.

        Args:
            members: The gradients in the order of the forward pass, the same on every rank.

        Raises:
            ValueError: A key is in use.
        """
        if self.ranks == 1:
            return
        taken = [member.key for member in members if member.key in self.worker]
        if taken:
            raise ValueError(
                f"rank {self.transport.rank}: two parameters have the name {taken[0]!r}: give each its own name"
            )
        # The backward pass reaches the last layer first.
        limit = self.compression.bucket_bytes or bucket_bytes_for(members, self.compression.mode)
        layouts = plan(members[::-1], limit, len(self.worker.buckets))
        with process.communicating(_CALL, self.transport):
            buckets = [self._bucket(layout) for layout in layouts]
        self.worker.add(buckets)
        self.groups |= {member.key: member.group for member in members}
        for bucket in buckets:
            if isinstance(bucket.pipeline, SparsePipeline):
                parts = [Delivered(bucket, bucket.pipeline, part) for part in bucket.parts]
                self.delivered |= {part.key: part for part in parts}

    def _bucket(self, layout: Layout) -> Bucket:
        """Create a bucket; a collective call."""
        return Bucket(layout, self._settings, self.transport, self._shared)

    def conditions(self, group: int) -> Conditions:
        """Return the conditions that a param group sets in the step in progress; group -1 stands for none."""
        del group
        return Conditions(epoch=self.epoch, idle=self.idle)

    def _read(self, group: int) -> Reading:
        try:
            return Reading(self.conditions(group), self._grad_scaler)
        except Exception as error:  # such as a learning rate that is no number: not an error of backward()
            return Reading(error)

    def anywhere(self, flags: Sequence[bool], call: str) -> list[bool]:
        """Return which flags are set on any rank; a collective call between steps.

        Args:
            flags: Flags of this rank, the same number on every rank.
            call: The script's call that waits for it, for reports.
        """
        with process.communicating(call, self.transport):
            counts = self.transport.allreduce(np.array(flags, np.int32))
        return [bool(count) for count in counts]

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a float32 or float64 tensor over the ranks, on the host; a collective call."""
        with process.communicating("step()", self.transport):
            total = self.transport.allreduce(tensor.cpu().numpy())
        return torch.from_numpy(total / self.ranks)

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far, including parameters that are sent dense."""
        total = Traffic()
        for bucket in self.worker.buckets:
            total.add(bucket.pipeline.traffic)
        return total

    def statistics(self, norms: bool) -> dict[str, float]:
        """Return statistics of each bucket and of all together since the last call; to be called between steps.

        Args:
            norms: Take norms in the next step, for the call after it.
        """
        return statistics({bucket.layout.number: bucket.pipeline.statistics(norms) for bucket in self.worker.buckets})

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return the state of this rank (residuals, thresholds, ...); to be called between steps.

        Args:
            copy: Copies an array to the host.
        """
        self.worker.undo_if_undoable()
        buffers = self.buffers()
        return {"buckets": [bucket.state_dict(copy, buffers) for bucket in self.worker.buckets]}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return an optimizer's buffers that belong to the state, by the keys of the gradients."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size; between steps.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration, or is damaged. All buckets
                keep their state.
        """
        require_state(state)
        self.worker.undo_if_undoable()
        self._grow(state)
        self._require_layout(state)
        before: list[tuple[Bucket, dict[str, Any]]] = []
        try:
            for bucket, saved in zip(self.worker.buckets, state["buckets"], strict=True):
                before.append((bucket, bucket.state_dict()))
                bucket.load_state_dict(saved)
        except ValueError:
            for bucket, own in before[:-1]:  # the last one refused its state and is unchanged
                bucket.load_state_dict(own)
            raise
        self.worker.confirm()  # nothing that was loaded depends on results that no optimizer has applied

    def reset(self) -> None:
        """Return to the state of a new exchange; a collective call between steps."""
        with process.communicating("reset()", self.transport):
            self.worker.undo_if_undoable()
            self.worker.confirm()
            for bucket in self.worker.buckets:
                bucket.reset()

    def _grow(self, state: Mapping[str, Any]) -> None:
        """Create buckets for parameters that had been trained when a state was saved, but not yet here."""
        if self._admit is not None and self.ranks > 1:
            for bucket in state["buckets"][len(self.worker.buckets) :]:
                self._admit(bucket["parameters"])

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size; the sum of the residuals is unchanged.

        Args:
            states: States that this rank takes over, from ``state_dict``; may be empty.
            leader: The state of the old rank 0, in which memories may be left out.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: A state belongs to another model, bucket size or configuration.
        """
        self.worker.undo_if_undoable()
        self._grow(leader)
        buckets = self.worker.buckets
        if buckets and not leader["buckets"]:
            return self.state_dict(), ["residuals start empty: it was saved by one rank, which exchanges nothing"]
        if leader["buckets"] and not buckets:
            return self.state_dict(), ["residuals are dropped: one rank alone exchanges nothing"]
        self._require_layout(leader)
        merged, notes = [], []
        for number, bucket in enumerate(buckets):
            state, more = bucket.merge([one["buckets"][number] for one in states], leader["buckets"][number])
            merged.append(state)
            notes += more
        return {"buckets": merged}, list(dict.fromkeys(notes))

    def _require_layout(self, state: Mapping[str, Any]) -> None:
        mine = [bucket.layout.keys for bucket in self.worker.buckets]
        theirs = [bucket["parameters"] for bucket in state["buckets"]]
        if mine != theirs:
            raise ValueError(
                f"rank {process.job.rank}: the state holds buckets of {theirs}, but here they are {mine}: load it "
                "with the model, bucket_bytes, dense_below and groups it was saved with, and with the same parameters "
                "frozen at first"
            )

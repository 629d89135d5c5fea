"""The exchange of one model's gradients, whichever front end they come through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.layout import Layout, Member, plan
from horovod_sparse.engine.worker import Worker
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.rules import Step
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic

_CALL = "construction of buckets"  # for reports of stalls


class Owner(Protocol):
    """The front end of a model, as its exchange sees it."""

    def step_for(self, group: int) -> Step:
        """Return the conditions that a param group sets in the step in progress; group -1 stands for none."""
        ...

    def place_named(self, names: Sequence[str]) -> None:
        """Create a bucket for parameters by their names, where they have none; a collective call."""
        ...


class Exchange:
    """Buckets, the worker that exchanges them and what they remember from step to step.

    Args:
        sparse: The configuration.
        transport: Used by nothing else; one rank alone exchanges nothing.
        owner: The front end.
        factor: Factor on the totals: 1/P averages.
        grad_scaler: The scaler that multiplies the loss.
        stall: How long a bucket may wait.
        hold_zeros: Whether a gradient of zeros only means that its parameter took no part in the step.

    Attributes:
        compression: The configuration.
        ranks: Number of ranks P.
        worker: Takes the gradients.
        epoch: In progress, where somebody told.
        idle: Whether gradients are collected although this rank had no backward pass.
    """

    def __init__(
        self,
        sparse: Sparse,
        transport: Transport,
        owner: Owner,
        factor: float,
        grad_scaler: torch.amp.GradScaler | None,
        stall: Limits,
        hold_zeros: bool = False,
    ) -> None:
        self.compression = sparse
        self.ranks = transport.size  # a rank that leaves ends MPI: it is not asked later
        self.epoch: int | None = None
        self.idle = False
        self.undoable = grad_scaler is not None and grad_scaler.is_enabled()
        self._transport = transport
        self._owner = owner
        self._factor = factor
        self._grad_scaler = grad_scaler
        self._hold_zeros = hold_zeros
        self._names: list[list[str]] = []  # of the parameters of each bucket
        self._shared: dict[type[Any], Any] = {}  # by the rules of all buckets
        momentum = sparse.momentum
        clip = None if momentum is None or momentum.max_norm is None else partial(momentum.clip, ranks=self.ranks)
        self.worker = Worker(self._conditions, self.undoable, clip)
        if self.ranks > 1:
            process.abort_on_error()
            with process.communicating(_CALL, transport):
                process.watch.add(transport, weakref.ref(self.worker), self._names, stall)

    def order(self, names: list[str]) -> list[str]:
        """Some names in the order that rank 0 has them in; a collective call."""
        with process.communicating(_CALL, self._transport):
            in_order: list[str] = self._transport.broadcast_object(names)
        return in_order

    def add(self, members: Sequence[Member]) -> None:
        """Gives parameters places in new buckets; a collective call.

        Args:
            members: In the order of the forward pass, which is the same on every rank.
        """
        if self.ranks == 1:
            return
        # Backward reaches the last layer first.
        layouts = plan(members[::-1], self.compression.bucket_bytes, len(self.worker.buckets))
        self._names += [layout.names for layout in layouts]
        with process.communicating(_CALL, self._transport):
            self.worker.add([self._bucket(layout) for layout in layouts])

    def _bucket(self, layout: Layout) -> Bucket:
        settings = (self._transport, self._factor, self.undoable, self._hold_zeros, self._shared)
        return Bucket(layout, self.compression, *settings)

    def _conditions(self, group: int) -> Callable[[], Step]:
        step: Step | Exception
        try:
            step = replace(self._owner.step_for(group), epoch=self.epoch, idle=self.idle)
        except Exception as error:  # such as a learning rate that is no number: not an error of backward()
            step = error

        def conditions() -> Step:
            if isinstance(step, Exception):
                raise step
            # The loss scale lies on the device, and reading it waits for the device. It changes between steps only.
            return step if self._grad_scaler is None else replace(step, loss_scale=self._grad_scaler.get_scale())

        return conditions

    def anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Which of some flags are set on any of the ranks; a collective call between steps."""
        with process.communicating("synchronize()", self._transport):
            counts = self._transport.allreduce(np.array(flags, np.int32))
        return [bool(count) for count in counts]

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far, parameters that travel dense included."""
        return self.worker.traffic

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Everything remembered on this rank (residuals, thresholds, ...); to be called between steps.

        Args:
            copy: Copies an array to the host.
        """
        self.worker.settle()
        return self.worker.state_dict(copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of as many ranks; to be called between steps.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
        """
        self.worker.settle()
        self._grow(state)
        self.worker.load_state_dict(state)

    def _grow(self, state: Mapping[str, Any]) -> None:
        """Makes places for parameters that learned when a state was saved, and have not learned here so far."""
        if self.ranks > 1:
            for bucket in state["buckets"][len(self.worker.buckets) :]:
                self._owner.place_named(bucket["parameters"])

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state that goes on from those of another number of ranks; the sum of the residuals stays what it was.

        Args:
            states: Those that this rank takes over, as ``state_dict`` gave them; there may be none.
            leader: The old rank 0's, in which memories may be left out.

        Returns:
            A state for ``load_state_dict``, and notes on what has not been carried over.

        Raises:
            ValueError: A state belongs to another model, bucket size or configuration.
        """
        self.worker.settle()
        self._grow(leader)
        return self.worker.merge(states, leader)

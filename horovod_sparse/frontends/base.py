"""Interface of the front ends that exchange gradients for optimizers, and functions that all front ends share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Segment
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.frontends.members import job
from horovod_sparse.transport.traffic import Traffic

# Attributes of a class that belong to itself. Horovod's broadcast_optimizer_state recognizes optimizers by __module__.
_OWN = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}


class FrontEnd(Protocol):
    """Exchange of the gradients of one model for one or several optimizers.

    The names do not collide with those of optimizers, on which the Horovod front end defines them.
    """

    def exchange_progress(self) -> tuple[int | None, bool]:
        """Return the epoch, None if it was not set, and whether this rank had no backward pass in this step."""

    @property
    def exchange_ranks(self) -> int:
        """World size P."""

    @property
    def exchange_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers, always in the same order."""

    @property
    def exchange_scaled(self) -> bool:
        """True if the exchange follows a scale of the loss."""

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """Return the bucket that exchanges the gradient of a parameter; None if there is none."""

    def selected(self) -> Mapping[torch.Tensor, tuple[Bucket, Segment]]:
        """Return bucket and segment of every parameter whose gradient is selected from, not sent dense."""

    def between_steps(self) -> bool:
        """Return whether no exchange is in progress."""

    def settle(self) -> None:
        """Undo a step that was exchanged but skipped."""

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the ranks; a collective call between two exchanges."""

    def place_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for parameters by their names, if they are known and have none; a collective call."""


def group_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.Tensor, int]:
    """Return the number of each parameter's param group, which stays the same when an optimizer gets more groups."""
    return {
        p: index * len(optimizers) + place
        for place, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }


def numbered_group(
    optimizers: Sequence[torch.optim.Optimizer], number: int
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Return the param group with a number from ``group_numbers``, and its optimizer.

    Raises:
        RuntimeError: The group was removed.
    """
    index, place = divmod(number, len(optimizers))
    if index >= len(optimizers[place].param_groups):
        raise RuntimeError(
            f"rank {job().rank}: param group {index} of {type(optimizers[place]).__name__} was removed, but its "
            "gradients are still exchanged: keep the group, with lr=0 or frozen parameters"
        )
    return optimizers[place], optimizers[place].param_groups[index]


class Exchanging:
    """Functions that all front ends offer to their users.

    They do not call ``super()``, as the wrapped optimizers copy them into classes that are built at run time.
    """

    _sparse: Sparse
    _exchange: Exchange | None = None  # None: this rank takes no part, or has not begun
    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch at its start, as with ``DistributedSampler.set_epoch``.

        Needed by schedules that depend on the epoch, unless they have ``steps_per_epoch``; without effect on others.

        Args:
            epoch: Number of the epoch, from 0; the same on every rank.
        """
        self._epoch = epoch

    def statistics(self, *, norms: bool = False) -> dict[str, float]:
        """Return statistics of this rank's exchange since the last call, for any logger.

        Keys name a bucket (``bucket0/density``) or all of them (``total/density``); docs/watch.md explains each.
        Counting costs next to nothing; norms cost two passes over the gradients in one step.

        Args:
            norms: Compute norms in the next step, or at the end of the next round of local steps. The call after that
                returns ``total/gradient_norm``, ``total/residual_norm``, ``total/gain`` and those of each bucket.

        Returns:
            Plain numbers by key; empty if there was no step or there is a single rank.

        Raises:
            RuntimeError: Called between backward() and step() of a ``DistributedOptimizer``.
        """
        exchange = self._between_steps()
        return {} if exchange is None else exchange.worker.statistics(norms)

    def reset(self) -> None:
        """Forget residuals, velocities and decisions, as at the start of the training; a collective call between steps.

        For scripts that go back to an earlier model, such as after a search for a learning rate, and have no state of
        the exchange of that time to load.
        """
        exchange = self._between_steps()
        if exchange is not None:
            exchange.reset()

    def _between_steps(self) -> Exchange | None:
        """Return the exchange, ready for its state to be read."""
        return self._exchange

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self._sparse

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far, including parameters that are sent dense."""
        return Traffic() if self._exchange is None else self._exchange.traffic


class ExchangingGradients(Exchanging):
    """Functions that the front ends for gradients share; part of ``FrontEnd``."""

    _idle = False  # no backward pass in the step in progress
    _parameter_names: dict[torch.Tensor, str]  # keys of the parameters in the buckets
    _selected: tuple[int, dict[torch.Tensor, tuple[Bucket, Segment]]] | None = None  # with the number of buckets

    def exchange_progress(self) -> tuple[int | None, bool]:
        """Return the epoch, and whether this rank had no backward pass in the step in progress."""
        return self._epoch, self._idle

    @property
    def exchange_ranks(self) -> int:
        """World size P."""
        assert self._exchange is not None
        return self._exchange.ranks

    @property
    def exchange_scaled(self) -> bool:
        """True if the exchange follows a scale of the loss."""
        return self._exchange is not None and self._exchange.scaled

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """Return the bucket that exchanges the gradient of a parameter."""
        assert self._exchange is not None
        return self._exchange.worker.bucket_of(self._parameter_names.get(parameter))

    def between_steps(self) -> bool:
        """Return whether no exchange is in progress."""
        raise NotImplementedError

    @property
    def exchange_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers, always in the same order."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drop the gradients of the last exchange, which no optimizer has applied, and what was remembered of them.

        A backward pass that begins with cleared gradients does the same by itself. To be called on all ranks.

        Raises:
            RuntimeError: The exchange cannot be undone, as neither ``undoable=True`` nor a ``grad_scaler`` was given.
        """
        exchange = self._between_steps()
        if exchange is not None and exchange.ranks > 1:
            exchange.worker.resume([])
        for optimizer in self.exchange_optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = None

    def settle(self) -> None:
        """Undo a step that was exchanged but skipped."""
        if self.between_steps() and self._exchange is not None:
            self._exchange.worker.settle()

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a contiguous tensor over the ranks; a collective call between two exchanges."""
        assert self._exchange is not None
        return self._exchange.average(tensor)

    def selected(self) -> Mapping[torch.Tensor, tuple[Bucket, Segment]]:
        """Return bucket and segment of every parameter whose gradient is selected from, not sent dense."""
        buckets = [] if self._exchange is None else self._exchange.worker.buckets
        if self._selected is None or self._selected[0] != len(buckets):
            places = {
                segment.key: (bucket, segment)
                for bucket in buckets
                if isinstance(bucket.pipeline, SparsePipeline)
                for segment in bucket.layout.segments
            }
            parameters = {p: places[key] for p, key in self._parameter_names.items() if key in places}
            self._selected = len(buckets), parameters
        return self._selected[1]


class ForOptimizers(ExchangingGradients):
    """Functions of front ends that take the optimizers of a model instead of wrapping one.

    Attributes:
        optimizers: The optimizers.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    _grouped: list[list[int]] | None = None  # ids of the parameters of each group, as last checked

    def _require_groups(self) -> None:
        """Raise RuntimeError if a parameter was moved into another param group, whose rate its residual cannot follow.

        To be called before each step, on all ranks.
        """
        grouped = [[id(p) for p in group["params"]] for group in self.param_groups]
        if grouped == self._grouped:
            return
        group_of = group_numbers(self.optimizers)
        for p, name in self._parameter_names.items():
            bucket = self.bucket_of(p)
            if bucket is not None and group_of.get(p, bucket.layout.group) != bucket.layout.group:
                raise RuntimeError(
                    f"rank {job().rank}: {name} was added to an optimizer, or moved into another of its param groups, "
                    "after the first backward pass: add_param_group() before it, with lr=0 for what is trained later, "
                    "or begin with a new exchange of the model"
                )
        self._grouped = grouped

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def exchange_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers, always in the same order."""
        return self.optimizers


def functions_of(*classes: type) -> dict[str, Any]:
    """Return the attributes that classes define, for a class that is built at run time; later classes override."""
    return {name: value for part in classes for name, value in vars(part).items() if name not in _OWN}

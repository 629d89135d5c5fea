"""Functions that all front ends offer to their users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.transport.traffic import Traffic


class ExchangeLike(Protocol):
    """Exchanges of a front end, as its functions use them."""

    epoch: int | None

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far."""

    def statistics(self, norms: bool) -> dict[str, float]:
        """Return statistics since the last call; take norms in the next step."""

    def reset(self) -> None:
        """Return to the state of a new exchange; a collective call between steps."""


class Exchanging:
    """Functions of all front ends; also a base class of wrapped optimizers, whose own names it must not use."""

    _sparse: Sparse
    _exchange: ExchangeLike | None = None  # None: this rank takes no part, or has not begun
    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch at its start, as with ``DistributedSampler.set_epoch``.

        Needed by schedules that depend on the epoch, unless they have ``steps_per_epoch``; without effect on others.

        Args:
            epoch: Number of the epoch, from 0; the same on every rank.
        """
        self._epoch = epoch
        if self._exchange is not None:
            self._exchange.epoch = epoch

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
        exchange = self._finished_exchange()
        return {} if exchange is None else exchange.statistics(norms)

    def reset(self) -> None:
        """Forget residuals, velocities and decisions, as at the start of the training; a collective call between steps.

        For scripts that go back to an earlier model, such as after a search for a learning rate, and have no state of
        the exchange of that time to load.
        """
        exchange = self._finished_exchange()
        if exchange is not None:
            exchange.reset()

    def _finished_exchange(self) -> ExchangeLike | None:
        """Finish the last step, where the front end can, and return the exchange, whose state may now be read."""
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
    """Functions of the front ends that exchange gradients."""

    _exchange: GradientExchange | None = None

    def exchanged_parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose gradients are exchanged; empty if they are not known yet."""
        return () if self._exchange is None else self._exchange.names

    def discard(self) -> None:
        """Drop the gradients of the last exchange, which no optimizer has applied, and what was remembered of them.

        A backward pass that begins with cleared gradients does the same by itself. To be called on all ranks.

        Raises:
            RuntimeError: The exchange cannot be undone, as neither ``undoable=True`` nor a ``grad_scaler`` was given.
        """
        exchange = self._finished_exchange()
        if isinstance(exchange, GradientExchange):
            exchange.discard()

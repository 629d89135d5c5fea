"""Functions that front ends offer to their users."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.transport.traffic import Traffic


class Exchange(Protocol):
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
    """Functions of all front ends; a base class of optimizers, too, on whose names it must not collide."""

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
        exchange = self._exchange_between_steps()
        return {} if exchange is None else exchange.statistics(norms)

    def reset(self) -> None:
        """Forget residuals, velocities and decisions, as at the start of the training; a collective call between steps.

        For scripts that go back to an earlier model, such as after a search for a learning rate, and have no state of
        the exchange of that time to load.
        """
        exchange = self._exchange_between_steps()
        if exchange is not None:
            exchange.reset()

    def _exchange_between_steps(self) -> Exchange | None:
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
        exchange = self._exchange_between_steps()
        if isinstance(exchange, GradientExchange):
            exchange.discard()


# Exchanges that are objects of their own, not part of an optimizer.
separate: weakref.WeakSet[ExchangingGradients] = weakref.WeakSet()


# States of all LocalOptimizers.
local_states: weakref.WeakSet[Any] = weakref.WeakSet()


def within(optimizer: Any) -> Any:
    """Return the exchange that an optimizer has made, or an exchange itself; None for anything else."""
    return optimizer if hasattr(optimizer, "merge") else getattr(optimizer, "exchange", None)


def refuse_other_rounds(model: torch.nn.Module, exchange: Any) -> None:
    """Raise ValueError if another ``LocalOptimizer`` than the one to save has parameters of the model in a round."""
    for other in local_states:
        names = [] if other is exchange else other.apart_in(model)
        if names:
            raise ValueError(
                f"another LocalOptimizer has moved {names[0]} since its last exchange, and a checkpoint of the model "
                "would give rank 0's values to all ranks: call synchronize() of every LocalOptimizer before saving"
            )


def exchange_of(model: torch.nn.Module, optimizer: Any) -> Any:
    """Return what exchanges the gradients of a model, or what its optimizer exchanges; None if that is neither.

    Raises:
        ValueError: There are several, or one that does not know its parameters.
    """
    own = within(optimizer)
    if own is not None:
        return own
    found, unknown = _serving(model)
    if len(found) > 1 or (unknown and not found):
        gc.collect()  # one of them may be that of an earlier model
        found, unknown = _serving(model)
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} exchanges serve the model, but a checkpoint holds the state of one: use one for all "
            "optimizers, such as SparseState(compression, [first, second], named_parameters), or pass exchange="
        )
    if unknown and not found:
        raise ValueError(
            "an unpickled SparseState does not know its model yet: set its named_parameters, or pass exchange= here"
        )
    return next(iter(found), None)


def _serving(model: torch.nn.Module) -> tuple[list[ExchangingGradients], list[ExchangingGradients]]:
    """Return the exchanges that have parameters of a model, and those that do not know theirs."""
    of_model = set(model.parameters())
    known = {one: set(one.exchanged_parameters()) for one in separate}
    found = [one for one, parameters in known.items() if not parameters.isdisjoint(of_model)]
    return found, [one for one, parameters in known.items() if not parameters]

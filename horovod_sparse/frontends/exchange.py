"""Exchange of the gradients of one model for its optimizers: what the front ends for gradients share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Member
from horovod_sparse.frontends.clipping import warn_of_clipping
from horovod_sparse.frontends.confirmation import follow_optimizers, prepare_to_follow
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.momentum import buffers_of, load_buffers, register_momentum_hooks
from horovod_sparse.frontends.optimizers import (
    applies_momentum,
    group_numbers,
    is_adaptive,
    momentum_of,
    optimizer_of,
    parameters_in,
)
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.frontends.units import ResidualUnits
from horovod_sparse.rules import Conditions, Momentum
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")


class GradientExchange(Exchange):
    """Exchange of the gradients of one model for one or several optimizers.

    It reads the conditions of a step from their param groups, learns from their step hooks what they have applied, and
    hands velocities over to them.

    Args:
        sparse: The configuration.
        transport: The ranks that take part; used by this exchange only.
        optimizers: The optimizers, held weakly; always in the same order.
        factor: Factor on the totals; 1/P averages.
        stall: Limits of the wait for a bucket.
        residual_unit: "update" or "gradient"; None: by the class of each optimizer.
        instead_of_clipping: Remedy for scripts that clip exchanged gradients, for messages.
        without_exchange: How a script computes gradients without an exchange, for messages.
        between_steps: Returns whether no exchange is in progress; with DDP, it first finishes the last one.
        settings: Other arguments of ``Exchange``.

    Attributes:
        names: Keys of the parameters whose gradients are exchanged.
        delivered_of: ``delivered`` by parameter.
        last_pass: Torch's number of the last backward pass for which ``begin_backward`` looked at gradients.
        instead_of_clipping: The argument.
        between_steps: The argument.
    """

    def __init__(
        self,
        sparse: Sparse,
        transport: Transport,
        optimizers: Sequence[torch.optim.Optimizer],
        factor: float,
        stall: Limits,
        *,
        residual_unit: str | None = None,
        instead_of_clipping: str = "let the compression clip each rank's gradient before the exchange: "
        "memory='momentum' with max_norm, see Clipping in docs/ddp.md",
        without_exchange: str,
        between_steps: Callable[[], bool],
        **settings: Any,
    ) -> None:
        adaptive = any(map(is_adaptive, optimizers))
        super().__init__(sparse, transport, factor, stall, adaptive=adaptive, **settings)
        self.names: dict[torch.Tensor, str] = {}
        self.last_pass = -1
        self.delivered_of: Mapping[torch.Tensor, Delivered] = {}
        self.between_steps, self.instead_of_clipping = between_steps, instead_of_clipping
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._units = ResidualUnits(residual_unit, transport.rank)
        self._grouped: list[list[int]] | None = None  # ids of the parameters of each group, as last checked
        self._optimizer_loaded = self._loaded = False  # a state, since the last exchange
        self._warned = False  # that only an optimizer has loaded a state
        self.worker.without_exchange, self.worker.needs_confirmation = without_exchange, bool(optimizers)
        for optimizer in optimizers:
            register_step_hooks(optimizer, sparse, self)
        follow_optimizers(optimizers, self)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, in the order in which they were given."""
        alive = [reference() for reference in self._optimizers]
        return tuple(optimizer for optimizer in alive if optimizer is not None)

    def create_buckets(
        self,
        named: Mapping[str, torch.Tensor],
        user_groups: Callable[[Sequence[torch.Tensor]], Mapping[int, int]] = lambda _: {},
        first_in_forward: Sequence[Member] = (),
    ) -> None:
        """Create buckets for the gradients of parameters; a collective call.

        Args:
            named: The parameters by their keys, in the order of the forward pass, of which rank 0's counts.
            user_groups: Returns the number of the user's group for the id of each parameter that is in one.
            first_in_forward: Other gradients, which come first in that order, and so last in the exchange.
        """
        in_order = {key: named[key] for key in self.order(list(named))}
        group_of, user_group = group_numbers(self.optimizers), user_groups(list(in_order.values()))
        least = self.compression.dense_below
        members = [
            Member.of(key, p, group_of.get(p, -1), user_group.get(id(p)), least, shard_of(p))
            for key, p in in_order.items()
            if shard_of(p).numel()
        ]
        self.add([*first_in_forward, *members])
        self.names |= {p: key for key, p in in_order.items()}
        self.delivered_of = {p: self.delivered[key] for p, key in self.names.items() if key in self.delivered}

    def conditions(self, group: int) -> Conditions:
        """Return learning rate, momentum and residual unit of a param group; the defaults for group -1."""
        self._warn_of_load()
        conditions = super().conditions(group)
        if group < 0:
            return conditions
        optimizer, settings = self._param_group(group)
        rate: Any = settings.get("lr")
        if rate is None:  # the optimizer chooses it
            return conditions
        if not (isinstance(rate, torch.Tensor) and rate.is_cuda):  # which the worker thread reads
            rate = float(rate)
            self._units.note(optimizer, group, rate)
        momentum = self.momentum(group)
        return replace(
            conditions,
            learning_rate=rate,
            scale_free=self._units.scale_free(optimizer),
            momentum=momentum,
            momentum_after=applies_momentum(settings) and not momentum.factor,
        )

    def momentum(self, group: int) -> Momentum:
        """Return the momentum of a param group that the memory applies."""
        takes_over = group >= 0 and self.compression.takes_momentum_over
        return momentum_of(*self._param_group(group)) if takes_over else Momentum()

    def _param_group(self, number: int) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Return the param group with a number from ``group_numbers``, and its optimizer."""
        position, index = optimizer_of(number, len(self._optimizers))
        optimizer = self.optimizers[position]
        if index >= len(optimizer.param_groups):
            raise RuntimeError(
                f"rank {job().rank}: param group {index} of {type(optimizer).__name__} was removed, but its gradients "
                "are still exchanged: keep the group, with lr=0 or frozen parameters"
            )
        return optimizer, optimizer.param_groups[index]

    def undo_if_undoable(self) -> None:
        """Undo a step that was exchanged but not applied, if it can be, and if no exchange is in progress."""
        if self.between_steps():
            self.worker.undo_if_undoable()

    def require_groups(self) -> None:
        """Raise RuntimeError if a parameter was moved into another param group, whose rate its residual cannot follow.

        To be called before each step, on all ranks.
        """
        grouped = [[id(p) for p in group["params"]] for one in self.optimizers for group in one.param_groups]
        if grouped == self._grouped:
            return
        group_of = group_numbers(self.optimizers)
        for p, name in self.names.items():
            if p in group_of and group_of[p] != self.groups.get(name, group_of[p]):
                raise RuntimeError(
                    f"rank {job().rank}: {name} was added to an optimizer, or moved into another of its param groups, "
                    "after the first backward pass: add_param_group() before it, with lr=0 for what is trained later, "
                    "or begin with a new exchange of the model"
                )
        self._grouped = grouped

    def discard(self) -> None:
        """Undo the last exchange, which no optimizer has applied, and clear the gradients."""
        if self.ranks > 1:
            self.worker.drop_unapplied()
        for optimizer in self.optimizers:
            for p in parameters_in(optimizer):
                p.grad = None

    def note_load(self) -> None:
        """Note that an optimizer has loaded a state of another step."""
        self._optimizer_loaded = bool(self.delivered) and self.worker.step.number >= 0

    def _warn_of_load(self) -> None:
        if self._optimizer_loaded and not (self._loaded or self._warned):
            self._warned = True
            _LOG.warning(
                "rank %d: the optimizer has loaded a state of another step, but residuals and velocities are those of "
                "the last step: load the state of the exchange, too, or call reset()",
                self.transport.rank,
            )
        self._optimizer_loaded = self._loaded = False

    def reset(self) -> None:
        """Return to the state of a new exchange; a collective call between steps."""
        super().reset()
        self._loaded = True

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the momentum buffers that belong to the state."""
        return buffers_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, as ``Exchange.load_state_dict``, with the momentum buffers that belong to it."""
        super().load_state_dict(state)
        self._loaded = True
        if self.worker.keys:
            saved = [bucket.get("buffers", {}) for bucket in state["buckets"]]
            load_buffers(self, {key: buffer for buffers in saved for key, buffer in buffers.items()})

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size, as ``Exchange.merge``, with rank 0's buffers."""
        merged, notes = super().merge(states, leader)
        for state, saved in zip(merged["buckets"], leader["buckets"], strict=False):
            state.update({"buffers": saved["buffers"]} if "buffers" in saved else {})
        return merged, notes


def register_step_hooks(optimizer: torch.optim.Optimizer, sparse: Sparse, exchange: GradientExchange | None) -> None:
    """Register the hooks around an optimizer's steps, each once, in the order in which they run.

    They confirm the exchange, look at the gradients as the script left them, and change these for the momentum.

    Args:
        optimizer: The optimizer.
        sparse: The configuration.
        exchange: The exchange of its gradients, held weakly; None: it is not there yet.
    """
    prepare_to_follow(optimizer)
    warn_of_clipping(optimizer, exchange)
    register_momentum_hooks(optimizer, sparse, exchange)

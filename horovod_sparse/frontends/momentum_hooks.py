"""Base of the hooks that apply momentum around an optimizer's steps."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.engine.clipping import clip
from horovod_sparse.frontends.confirmation import with_closure
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.optimizers import overflowed, parameters_in
from horovod_sparse.frontends.shards import shard_of, total_norm

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_LOG = logging.getLogger("horovod_sparse")
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # of the function that calls step hooks


class MomentumHooks(ABC):
    """Hooks around the steps of an optimizer; in a step that a GradScaler skips, they change nothing.

    Attributes:
        options: Options of the momentum, as in ``MomentumCorrection``.
        exchanges: Exchanges of gradients of the optimizer; empty if this rank takes part in none.
    """

    options: Any
    _reported = False  # that optimizers are clipped separately
    # A gradient of the last step, with its version.
    _last_gradient: tuple[weakref.ref[torch.Tensor], tuple[int, int] | None] | None = None
    _added_to_momentum = False  # whether a backward pass has added to gradients that hold momentum of the last step

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    @eager
    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Prepare the gradients before an optimizer's step, or after each evaluation of its closure."""
        if _nested(optimizer):
            return None
        self._restore(optimizer)  # in case the last step failed
        prepare = functools.partial(self._prepare, optimizer)
        # An optimizer may evaluate a closure more than once.
        changed = with_closure(args, kwargs, prepare, before=functools.partial(self._restore, optimizer))
        if changed is None:
            prepare()
        return changed

    @eager
    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Restore what was changed for an optimizer's step."""
        self._restore(optimizer)
        gradient = next((p.grad for p in self._with_momentum(optimizer) if p.grad is not None), None)
        self._last_gradient = None if gradient is None else (weakref.ref(gradient), version_of(gradient))

    def _with_momentum(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Iterate over the parameters whose gradients hold momentum after a step."""
        places = [exchange.delivered_of for exchange in self.exchanges]
        for p in parameters_in(optimizer):
            for delivered in (selected[p] for selected in places if p in selected):
                if self.options.own is not None or delivered.sample is not None:
                    yield p

    @property
    def may_hold_momentum(self) -> bool:
        """True if gradients may hold momentum of the last step; cheap."""
        return self._added_to_momentum or (
            self._last_gradient is not None and version_of(self._last_gradient[0]()) == self._last_gradient[1]
        )

    def note_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether a backward pass adds to gradients that hold momentum of the last step."""
        gradients = [p.grad for p in self._with_momentum(optimizer) if p.grad is not None]
        last = self._last_gradient[0]() if self._last_gradient is not None else None
        kept = self._added_to_momentum or any(one is last for one in gradients)
        # torch._foreach_zero_ changes no version of a DTensor.
        self._added_to_momentum = kept and any(bool(shard_of(one).any()) for one in gradients)
        self._last_gradient = None

    def note_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Note changes of the optimizer's state by the script; called before a backward pass changes gradients."""
        del optimizer

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo temporary changes of the optimizer; by default there are none."""
        del optimizer

    @torch.no_grad()
    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if overflowed(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)
        if self.may_hold_momentum:  # no backward pass has begun since the last step
            self.note_backward(optimizer)
        if self._added_to_momentum:
            raise RuntimeError(
                f"rank {job().rank}: gradients were not cleared between two steps of the optimizer. They hold momentum "
                "of the first, which would count again: call zero_grad() before backward(), and step() once after it, "
                "or use a compression without momentum, such as memory='residual'"
            )
        given = [p.grad for p in parameters_in(optimizer) if p.grad is not None]
        gradients = [shard_of(gradient) for gradient in given]
        if scale is not None:  # a GradScaler that lets torch's kernel unscale
            for gradient in gradients:
                gradient.div_(scale.to(gradient.device))
        if self._alone and self.options.max_norm is not None:  # with more ranks the worker has clipped them
            self._report_norms(optimizer)
            clip(gradients, lambda norm: self.options.clip(total_norm(norm, given), 1))
        self._apply(optimizer)
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device))

    def _report_norms(self, optimizer: torch.optim.Optimizer) -> None:
        together = [exchange.optimizers for exchange in self.exchanges]
        if not self._reported and any(len(them) > 1 and them[0] is optimizer for them in together):
            _LOG.warning(
                "a single rank clips the gradients of each optimizer by their own norm (max_norm=%g), but several "
                "ranks by the norm of the whole model",
                self.options.max_norm,
            )
        self._reported = True

    @abstractmethod
    def _apply(self, optimizer: torch.optim.Optimizer) -> None: ...

    @property
    def _alone(self) -> bool:
        return all(exchange.ranks == 1 for exchange in self.exchanges)


def version_of(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what changes with each change of a tensor in place: of a shard, or of the tensor that it is part of."""
    return None if tensor is None else (tensor._version, shard_of(tensor)._version)


def _nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step() that has called the hooks calls that of its base class, for which torch calls them, too.

    Read from the stack, as a step that fails calls no hook.
    """
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer
    return calls > 1

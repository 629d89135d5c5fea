"""Hooks around an optimizer's steps, which prepare the exchanged gradients for it."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod_sparse.engine.clipping import clip
from horovod_sparse.engine.step import State
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.optimizers import overflowed, parameters_in
from horovod_sparse.frontends.shards import shard_of, total_norm

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_LOG = logging.getLogger("horovod_sparse")
# The optimizers that each exchange was given.
_followed: weakref.WeakKeyDictionary[GradientExchange, weakref.WeakSet[torch.optim.Optimizer]]
_followed = weakref.WeakKeyDictionary()
# Exchanges that follow an optimizer, each with what its results are: see ``Worker.confirm``.
_of_optimizer: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, weakref.WeakKeyDictionary[GradientExchange, Callable[[int], bool]]
]
_of_optimizer = weakref.WeakKeyDictionary()
# Class of an optimizer that an exchange was not given, but that has applied its last result.
_unknown: weakref.WeakKeyDictionary[GradientExchange, str] = weakref.WeakKeyDictionary()
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # of the function that calls step hooks


def with_closure(
    args: Any, kwargs: Any, after: Callable[[], None], before: Callable[[], None] = lambda: None
) -> tuple[Any, Any] | None:
    """Return the arguments of a step with a closure that calls these functions, too; None if it has no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def evaluated() -> Any:
        before()
        loss = closure()
        after()
        return loss

    return args[:1], {**kwargs, "closure": evaluated}


class StepHooks(ABC):
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
        places = [exchange.selected for exchange in self.exchanges]
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
                gradient.div_(scale)
        if self._alone and self.options.max_norm is not None:  # with more ranks the worker has clipped them
            self._report_norms(optimizer)
            clip(gradients, lambda norm: self.options.clip(total_norm(norm, given), 1))
        self._apply(optimizer)
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)

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


def follow_optimizers(optimizers: Sequence[torch.optim.Optimizer], exchange: GradientExchange) -> None:
    """Report to an exchange, which is held weakly, what optimizers do with the results of their own groups.

    It learns of each step that has applied them, and of a state of another step that an optimizer loads. Without any
    optimizers, every one of this process that has one of the parameters is followed from its first step on.
    """
    _followed[exchange] = weakref.WeakSet(optimizers)
    _follow_unknown()
    for place, optimizer in enumerate(optimizers):
        prepare_to_follow(optimizer)
        _of_optimizer[optimizer][exchange] = functools.partial(_is_of, place, len(optimizers))


@functools.cache
def _follow_unknown() -> None:
    """Follow every optimizer of this process, once; torch iterates over its hooks, so this one is never removed."""

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for exchange, own in list(_followed.items()):
            if optimizer in own or not any(p in exchange.names for p in parameters_in(optimizer)):
                continue
            if own:
                _unknown.update({exchange: type(optimizer).__name__} if exchange.worker.step.unapplied else {})
            else:
                exchange.worker.needs_confirmation = True
                exchange.worker.confirm()

    register_optimizer_step_post_hook(stepped)


def require_known(exchange: GradientExchange) -> None:
    """Raise RuntimeError if an optimizer that an exchange was not given has applied its last result."""
    if exchange in _unknown:
        raise RuntimeError(
            f"rank {job().rank}: {_unknown[exchange]}, which the exchange was not given, has applied the gradients: "
            "change the param groups of the optimizer that it was given, or begin with a new exchange of the model, "
            "with the new optimizer"
        )


def _is_of(place: int, optimizers: int, group: int) -> bool:
    return group < 0 or group % optimizers == place


def prepare_to_follow(optimizer: torch.optim.Optimizer) -> None:
    """Register the hooks of an optimizer that exchanges follow, once.

    A front end whose exchange is created in the first backward pass calls this before: that pass may be part of a
    closure, and torch calls a hook of a step only if it was registered before the step.
    """
    if optimizer in _of_optimizer:
        return
    exchanges = _of_optimizer[optimizer] = weakref.WeakKeyDictionary()

    def confirm(optimizer: torch.optim.Optimizer) -> None:
        if not overflowed(optimizer):  # a GradScaler always calls step() with fused=True
            for exchange, applied in exchanges.items():
                exchange.worker.confirm(applied)
                _unknown.pop(exchange, None)

    @eager
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if any(exchange.worker.step.state is State.COLLECTING for exchange in exchanges):
            raise RuntimeError(
                f"rank {job().rank}: {type(optimizer).__name__} takes a step inside of backward(), but gradients are "
                "averaged by its end: step after backward() instead of in a hook of a parameter"
            )
        # The optimizer uses the result of each evaluation, even if it evaluates the closure again.
        return with_closure(args, kwargs, functools.partial(confirm, optimizer))

    def loading(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        # Numbered as in state_dict(), which would call the user's hooks.
        parameters = enumerate(parameters_in(optimizer))
        own = {number: optimizer.state[p] for number, p in parameters if p in optimizer.state}
        if not _equal(state["state"], own):
            for exchange in exchanges:
                exchange.note_load()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(eager(lambda optimizer, *_: confirm(optimizer)))
    optimizer.register_load_state_dict_pre_hook(loading)


def _equal(loaded: Mapping[Any, Mapping[str, Any]], own: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return whether two states of an optimizer are known to be of the same step."""
    pairs = [(loaded.get(key, {}).get(name), value) for key, state in own.items() for name, value in state.items()]
    tensors = [(one, other) for one, other in pairs if isinstance(other, torch.Tensor)]
    return bool(tensors) and all(isinstance(one, torch.Tensor) and _same(one, other) for one, other in tensors)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((shard_of(one).cpu() == shard_of(other).cpu()).all())

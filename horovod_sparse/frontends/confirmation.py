"""Confirmation: exchanges learn from hooks around an optimizer's steps which of their results were applied."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod_sparse.engine.step import State
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.optimizers import optimizer_of, overflowed, parameters_in
from horovod_sparse.frontends.shards import shard_of

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

# The optimizers that each exchange was given.
_optimizers_of: weakref.WeakKeyDictionary[GradientExchange, weakref.WeakSet[torch.optim.Optimizer]]
_optimizers_of = weakref.WeakKeyDictionary()
# The exchanges of an optimizer, each with a function that returns whether a param group, by its number, is its own.
_exchanges_of: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, weakref.WeakKeyDictionary[GradientExchange, Callable[[int], bool]]
]
_exchanges_of = weakref.WeakKeyDictionary()
# Class of an optimizer that an exchange was not given, but that has applied its last result.
_unknown: weakref.WeakKeyDictionary[GradientExchange, str] = weakref.WeakKeyDictionary()


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


def follow_optimizers(optimizers: Sequence[torch.optim.Optimizer], exchange: GradientExchange) -> None:
    """Report to an exchange, which is held weakly, what optimizers do with the results of their own groups.

    It learns of each step that has applied them, and of a state of another step that an optimizer loads. Without any
    optimizers, every one of this process that has one of the parameters is followed from its first step on.
    """
    _optimizers_of[exchange] = weakref.WeakSet(optimizers)
    _follow_unknown()
    for position, optimizer in enumerate(optimizers):
        prepare_to_follow(optimizer)
        _exchanges_of[optimizer][exchange] = functools.partial(_is_of, position, len(optimizers))


@functools.cache
def _follow_unknown() -> None:
    """Follow every optimizer of this process, once; torch iterates over its hooks, so this one is never removed."""

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for exchange, own in list(_optimizers_of.items()):
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


def _is_of(position: int, optimizers: int, group: int) -> bool:
    return group < 0 or optimizer_of(group, optimizers)[0] == position


def prepare_to_follow(optimizer: torch.optim.Optimizer) -> None:
    """Register the hooks of an optimizer that exchanges follow, once.

    A front end whose exchange is created in the first backward pass calls this before: that pass may be part of a
    closure, and torch calls a hook of a step only if it was registered before the step.
    """
    if optimizer in _exchanges_of:
        return
    exchanges = _exchanges_of[optimizer] = weakref.WeakKeyDictionary()

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

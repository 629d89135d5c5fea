"""Backward passes that begin before an optimizer has applied the result of the last exchange.

A step of the exchange is final when the optimizer has applied its result. If another backward pass begins before, the
gradients show what the script wants: if they still hold the result, the pass adds to it, and both belong to one step of
the optimizer. If they were cleared, the result was dropped, and so must be what the exchange remembers of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.autograd.graph import Node, get_gradient_edge

from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.frontends.confirmation import require_known
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.momentum import hooks_of
from horovod_sparse.frontends.scaling import by_bucket, factor_of
from horovod_sparse.frontends.shards import shard_of


def begin_backward(exchange: GradientExchange) -> None:
    """Resume or drop results that no optimizer has applied; called before a backward pass changes any gradient.

    May be called before each gradient of a pass: the first call settles it.

    Raises:
        RuntimeError: The gradients were changed, or only some of them were cleared; the compression's own momentum
            was applied to gradients that are added to; or results were dropped that cannot be undone.
    """
    running = torch._C._current_graph_task_id()  # negative outside of any
    if running < 0 or running != exchange.last_pass:
        _settle(exchange)
        exchange.last_pass = running


def _settle(exchange: GradientExchange) -> None:
    hooks_by_optimizer = hooks_of(exchange)
    for optimizer, hooks in hooks_by_optimizer.items():
        hooks.note_changes(optimizer)
    holding = {optimizer: hooks for optimizer, hooks in hooks_by_optimizer.items() if hooks.may_hold_momentum}
    unapplied = exchange.worker.unapplied_numbers()
    # What an earlier pass has added to, without an exchange, may have been cleared since.
    resumed = exchange.worker.resumed_numbers()
    if not (holding or unapplied or resumed) or _in_autograd_grad(exchange.delivered_of):
        return
    for optimizer, hooks in holding.items():
        hooks.note_backward(optimizer)
    if not (unapplied or resumed):
        return
    require_known(exchange)
    buckets = by_bucket(exchange.delivered_of)
    known = [number for number in unapplied if number in buckets]
    kept = [number for number in known if _holds_result(buckets[number], exchange.factor)]
    cleared = [number for number in resumed if not _holds_result(buckets[number])]
    momentum = exchange.compression.momentum
    if kept and momentum is not None and momentum.own is not None:
        raise RuntimeError(
            f"rank {job().rank}: gradients are added to exchanged ones before a step of the optimizer, which a "
            "compression with momentum of its own does not support: accumulate gradients without an exchange "
            f"({exchange.worker.without_exchange}), or set momentum=None in the compression"
        )
    exchange.worker.resume(kept)
    exchange.worker.drop_unapplied(cleared)


def _in_autograd_grad(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether torch.autograd.grad() runs, whose gradients it returns; False outside of a backward pass."""
    if torch._C._current_graph_task_id() < 0:
        return False
    return any(_is_captured(get_gradient_edge(p).node) for p in parameters if p.requires_grad)


def _is_captured(accumulation: Node) -> bool:
    try:
        torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # torch refuses to answer for what autograd.grad() captures
        return True
    return False


def _holds_result(parameters: Mapping[torch.Tensor, Delivered], factor: float | None = None) -> bool:
    """Return whether a bucket's gradients hold the last result; raise RuntimeError if only some were cleared.

    Args:
        parameters: The bucket's parameters.
        factor: What the result was multiplied by; None: the gradients hold more than the result.
    """
    gradients, delivered = [p.grad for p in parameters], next(iter(parameters.values()))
    if not any(bool(shard_of(gradient).any()) for gradient in gradients if gradient is not None):
        return None not in gradients and delivered.is_zero  # then they look like cleared gradients
    scale = None if factor is None else factor_of(parameters, factor)
    if None in gradients or (scale is not None and abs(scale - 1) > 1e-2):
        raise RuntimeError(
            f"rank {job().rank}: some gradients of bucket {delivered.number} were cleared or changed after their "
            "exchange, and a backward pass would add to the others before a step of the optimizer: clear all of them, "
            "or change them only after the last backward pass before the step"
        )
    return True

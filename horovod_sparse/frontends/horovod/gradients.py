"""Gradients of a DistributedOptimizer: from hooks into buckets, and back into ``p.grad``."""

from __future__ import annotations

import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer as _Horovod

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.device import device_of
from horovod_sparse.frontends.arguments import agree_on_last_group
from horovod_sparse.frontends.base import ExchangingGradients
from horovod_sparse.frontends.eager import eager, weak_hook
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.horovod.arguments import numbered, user_level
from horovod_sparse.frontends.horovod.changes import changed
from horovod_sparse.frontends.horovod.grad_scaler import exchange_before_unscaling
from horovod_sparse.frontends.horovod.join import Use, let_join
from horovod_sparse.frontends.momentum import register_momentum_hooks, take_part_in_step
from horovod_sparse.frontends.optimizers import parameters_in
from horovod_sparse.frontends.unapplied import begin_backward
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")
_SHOWN = 3  # names of parameters that a message holds
_exchanging: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that exchange parameters


def _fixed(name: str) -> Any:
    """Return an attribute that the constructor sets, and nobody afterwards."""

    def value(optimizer: Any) -> Any:
        return vars(optimizer)[name]

    def set_value(optimizer: Any, given: Any) -> None:
        if vars(optimizer).setdefault(name, given) != given:
            raise ValueError(
                f"rank {hvd.rank()}: {name} cannot be changed, as the exchange was made for it: pass it to "
                "DistributedOptimizer"
            )

    return property(value, set_value)


class Gradients(ExchangingGradients):
    """Part of the wrapped optimizer that exchanges gradients; overrides Horovod's functions as ``_Optimizer`` does.

    It has no instances: ``functions_of`` copies what it defines. Its base class is for type checkers; ``wrapped`` adds
    it again.
    """

    # Gradients in flight: (gradient, version) in a bucket; Horovod's handle, a number or a function, with its context;
    # (None, None) while passes are accumulated.
    _handles: dict[torch.Tensor, tuple[Any, Any]]
    _allreduce_delay: dict[torch.Tensor, int]
    _requires_update: set[torch.Tensor]
    _groups: int | list[list[torch.Tensor]] | None
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool
    _should_synchronize: bool
    _sparse_allreduce_grad_async: Callable[..., tuple[Any, Any]]
    op = _fixed("op")
    process_set = _fixed("process_set")
    sparse_as_dense: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: Any,
        named_parameters: Any,
        sparse: Sparse,
        transport: Transport | None,
        grad_scaler: torch.amp.GradScaler | None,
        undoable: bool,
        residual_unit: str | None,
        stall: Limits,
        **of_horovod: Any,
    ) -> None:
        self._sparse = sparse
        self._hooks: list[Any] = []
        self._unhooked: list[torch.Tensor] = []  # exchanged, but frozen when hooks were registered
        self._frozen: list[torch.Tensor] = []  # parameters that have been trained on no rank so far
        self._sparse_gradients: set[torch.Tensor] = set()  # parameters whose gradient is a sparse tensor
        self._densified: dict[torch.Tensor, torch.Tensor] = {}  # dense copies of sparse gradients in this step
        self._use = Use()
        self._completed_by_scaler = False  # a GradScaler has called synchronize(), not the user
        self._retired = False  # whether a newer optimizer has taken parameters over
        if transport is not None:
            me: Any = weakref.proxy(self)
            self._exchange = GradientExchange(
                sparse,
                transport,
                [self],  # type: ignore[list-item]
                1.0 if of_horovod["op"] == hvd.Sum else 1.0 / transport.size,
                stall,
                grad_scaler=grad_scaler,
                undoable=undoable,
                residual_unit=residual_unit,
                admit=lambda keys: me._admit_named(keys),
                without_exchange="with torch.autograd.grad(), or backward_passes_per_step for what is accumulated",
                between_steps=lambda: all(handle is None for handle, _ in me._handles.values()),
            )
        else:
            register_momentum_hooks(self, sparse, None)  # type: ignore[arg-type]
        _Horovod.__init__(self, params, named_parameters, hvd.Compression.none, **of_horovod)

    @property
    def _alone(self) -> bool:
        """True if there is nothing to exchange: this rank is not in the process set, or alone in it."""
        return self._exchange is None or self._exchange.ranks == 1

    def _register_hooks(self) -> None:
        """Create buckets and hooks; Horovod's constructor calls this if there is more than one rank."""
        if self._alone:
            return
        self._admit(list(parameters_in(self)))  # type: ignore[arg-type]
        if self.process_set.process_set_id == hvd.global_process_set.process_set_id:
            let_join(self)
        exchange_before_unscaling()
        assert self._exchange is not None
        waiting = self._exchange.transport.waiting
        if hvd.rank() == 0 and waiting is not None and waiting.sleeps and "HOROVOD_CYCLE_TIME" not in os.environ:
            _report_cycle_time()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and exchange their gradients, too; otherwise as ``torch.optim.Optimizer.add_param_group``.

        A collective call: all ranks of the process set must add the same parameters, between two steps.

        Raises:
            ValueError: The parameters differ between ranks.
            RuntimeError: Called between backward() and step().
        """
        if self._handles:
            raise RuntimeError(
                f"rank {hvd.rank()}: add_param_group() between backward() and step(): call it after step()"
            )
        super(self.__class__, self).add_param_group(param_group)  # type: ignore[misc]
        if self._alone:
            return
        assert self._exchange is not None
        names = {p: name for name, p in numbered(self)} | self._parameter_names  # type: ignore[arg-type]
        added = agree_on_last_group(self.param_groups, names, self._exchange.transport)
        self._parameter_names |= added
        self._allreduce_delay |= dict.fromkeys(added, self.backward_passes_per_step)
        self._admit(list(added))

    def _admit(self, parameters: Sequence[torch.Tensor]) -> None:
        """Create buckets for parameters that require gradients, and remember the others as frozen."""
        self._take_over(parameters)
        self._frozen += [p for p in parameters if not p.requires_grad]
        self._create_buckets([p for p in parameters if p.requires_grad])

    def _create_buckets(self, parameters: Sequence[torch.Tensor]) -> None:
        """Create buckets and hooks for parameters."""
        assert self._exchange is not None
        real = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self._exchange.create_buckets(
            {self._parameter_names[p]: p for p in real}, functools.partial(_user_groups, self._groups)
        )
        self._requires_update.update(parameters)
        self._unhooked += parameters
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Register hooks on parameters that have none; torch does not allow it while a parameter is frozen."""
        before, after = weak_hook(self._backward_begins), weak_hook(self._accumulated)
        learning: list[Any] = [p for p in self._unhooked if p.requires_grad]
        self._hooks += [p.register_hook(before) for p in learning]
        self._hooks += [p.register_post_accumulate_grad_hook(after) for p in learning]
        self._unhooked = [p for p in self._unhooked if not p.requires_grad]

    def _admit_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for frozen parameters that were trained before a checkpoint; a collective call.

        Args:
            keys: Names of the parameters in the order of the bucket. Nothing is done if one is unknown or has a bucket.
        """
        frozen = {self._parameter_names[p]: p for p in self._frozen}
        if all(key in frozen for key in keys):
            chosen = [frozen[key] for key in reversed(keys)]
            self._frozen = [p for p in self._frozen if p not in set(chosen)]
            self._create_buckets(chosen)

    def _take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """End the exchange of older optimizers with the same parameters, which would exchange each gradient again."""
        others = [optimizer for optimizer in _exchanging if optimizer is not self]
        for older in [optimizer for optimizer in others if not optimizer._requires_update.isdisjoint(parameters)]:
            older._retire()
            warnings.warn(
                f"rank {hvd.rank()}: parameters of another DistributedOptimizer were wrapped once more: from now on, "
                "only the new optimizer exchanges them, and the old one refuses to step",
                stacklevel=user_level(),
            )
        _exchanging.add(self)

    def _retire(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._retired = [], True
        self._handles.clear()
        _exchanging.discard(self)

    def _backward_begins(self, gradient: torch.Tensor | None = None) -> None:
        """Settle what became of the last exchange; called before each gradient is accumulated, and by synchronize()."""
        del gradient
        assert self._exchange is not None
        if not self._handles:
            self._exchange.require_groups()
        begin_backward(self._exchange)

    def _accumulated(self, p: torch.Tensor) -> None:
        """Submit a parameter's gradient after the last backward pass of a step; called by its hook after each pass."""
        delay = self._allreduce_delay[p] - 1
        if delay < 0:
            raise AssertionError(
                f"rank {hvd.rank()}: the gradient of {self._parameter_names[p]} was computed more than "
                f"backward_passes_per_step={self.backward_passes_per_step} times before step(): increase it to "
                "accumulate gradients locally; after a backward pass that failed, call step() before the next one"
            )
        assert p.grad is not None
        if p.grad.requires_grad:
            raise RuntimeError(
                f"rank {hvd.rank()}: the gradient of {self._parameter_names[p]} has a graph, but gradients are "
                "exchanged in place: call backward() without create_graph=True"
            )
        self._allreduce_delay[p] = delay
        self._handles[p] = (None, None) if delay else self._allreduce_grad_async(p)

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Put a gradient into its bucket; those without a bucket are left to Horovod. Overrides Horovod's function."""
        assert self._exchange is not None
        worker, name = self._exchange.worker, self._parameter_names[p]
        if p.grad is None:
            p.grad = _no_gradient(p, sparse=p in self._sparse_gradients and not self.sparse_as_dense)
        if p.grad.is_sparse:
            self._sparse_gradients.add(p)
            if not self.sparse_as_dense:
                return self._gather(p)
        if name not in worker:
            if not p.numel():
                return p.grad, p.grad._version  # nothing to exchange; Horovod may not support its dtype
            handle: tuple[Any, Any] = _Horovod._allreduce_grad_async(self, p)
            return handle
        gradient = p.grad
        if gradient.is_sparse:
            gradient = self._densified[p] = gradient.to_dense()
        # While a parameter is frozen, its residual must not be sent: it is kept until the parameter is trained again.
        # It may have a gradient of an earlier pass of the step, which counts.
        hold = not (p.requires_grad or gradient.any())
        worker.put(name, gradient, hold)
        return p.grad, p.grad._version

    def _gather(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Let Horovod gather a sparse gradient."""
        assert self._exchange is not None
        if not (device_of(p.device).horovod_reaches or hvd.cuda_built()):
            raise RuntimeError(
                f"rank {hvd.rank()}: {self._parameter_names[p]} on {p.device} has a sparse gradient, which is "
                "left to Horovod, but this Horovod was built without CUDA: set sparse_as_dense=True"
            )
        if self._parameter_names[p] in self._exchange.worker:
            self._exchange.worker.leave_out(self._parameter_names[p])
        return self._sparse_allreduce_grad_async(p, self._parameter_names[p])

    @eager
    def synchronize(self) -> None:
        """Complete the exchange; every ``p.grad`` then holds the reduced gradient.

        Raises:
            RuntimeError: No rank has had a backward pass since the last step; raised on all ranks. Or gradients were
                changed during the exchange.
        """
        if self._alone:
            self._synchronized = True
            return
        exchange = self._exchange
        assert exchange is not None
        if self._retired:
            raise RuntimeError(
                f"rank {hvd.rank()}: parameters of this optimizer were wrapped once more, and a newer one exchanges "
                "them: use the newer optimizer"
            )
        if self._already_synchronized():
            return  # another exchange would count the gradients twice
        self._use.note()
        exchange.idle = not self._handles and all(p.grad is None for p in self._requires_update)
        try:
            with exchange.worker.completing():
                self._finish_exchange(exchange)
        except BaseException:
            self._clean_up_failed_step(exchange)
            raise
        finally:
            exchange.idle = False
        self._synchronized = True

    def _already_synchronized(self) -> bool:
        """Return whether the gradients are reduced already, and ``model.zero_grad()`` has not cleared them since."""
        kept = any(p.grad is not None for p in self._requires_update)
        return self._synchronized and not self._handles and kept

    def _finish_exchange(self, exchange: GradientExchange) -> None:
        self._backward_begins()  # if this rank had no backward pass
        self._submit(self._requires_update.difference(self._handles))
        self._submit([p for p, (handle, _) in self._handles.items() if handle is None])
        exchange.worker.wait_for_results()
        if self._unhooked:
            self._hook_parameters()
        if self._frozen:
            self._admit_learning(exchange)
        self._take_results()

    def _synchronize_for_scaler(self) -> None:
        """Synchronize, for a GradScaler that unscales gradients between backward() and step()."""
        if self._handles:
            self.synchronize()
            self._completed_by_scaler = True

    def _submit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Submit gradients that no hook has submitted: other ranks may have gradients of these parameters."""
        for p in parameters:
            self._handles[p] = self._allreduce_grad_async(p)

    def _admit_learning(self, exchange: GradientExchange) -> None:
        """Exchange parameters that were frozen at construction and now require gradients on any rank."""
        learning = exchange.anywhere([p.requires_grad for p in self._frozen], "synchronize()")
        new = [p for p, learns in zip(self._frozen, learning, strict=True) if learns]
        if not new:
            return
        self._frozen = [p for p, learns in zip(self._frozen, learning, strict=True) if not learns]
        self._create_buckets(new)
        self._submit(new)
        exchange.worker.wait_for_results()

    def _take_results(self) -> None:
        names = [self._parameter_names[p] for p in changed(self._handles)]
        for p, (handle, _) in self._handles.items():
            if not isinstance(handle, torch.Tensor):
                _take_from_horovod(p, handle)
            elif self._densified and p in self._densified:
                handle.zero_().add_(self._densified[p].to_sparse())
        self._forget_handles()
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise RuntimeError(
                f"rank {hvd.rank()}: the gradients of {shown} were changed between backward() and step(), during the "
                "exchange: call optimizer.synchronize() first, then clip them, and step inside "
                "`with optimizer.skip_synchronize():`"
            )

    def _clean_up_failed_step(self, exchange: GradientExchange) -> None:
        """Prepare for the next step after one that failed."""
        if not exchange.worker.interrupted:  # else there is no next step, and the exception must not be delayed
            for handle, _ in self._handles.values():
                # Horovod's: without this wait, its names could not be used again.
                if isinstance(handle, int):
                    hvd.synchronize(handle)
                elif callable(handle):
                    handle()
        if exchange.idle:  # these zeros were not computed by a backward pass
            for p in self._requires_update:
                p.grad = None
        self._forget_handles()

    def _forget_handles(self) -> None:
        """Prepare for the next step's backward passes."""
        self._handles.clear()
        self._densified.clear()
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)

    def _join(self) -> Callable[[], None] | None:
        """Participate in the other ranks' steps with zero gradients while this rank is in ``hvd.join()``.

        Returns:
            A function that waits for the end; None if there is nothing to exchange.
        """
        rank, exchange, frozen = hvd.rank(), self._exchange, [False] * len(self._frozen)
        assert exchange is not None
        if self._retired or not exchange.worker.keys:
            return None
        if exchange.undoable:
            raise ValueError(
                f"rank {rank}: hvd.join() cannot be used with a grad_scaler or undoable=True, as this rank would not "
                "learn which steps the others skip: let every rank take the same number of steps (equal shares of "
                "the data, drop_last=True)"
            )
        if isinstance(self, torch.optim.LBFGS):
            raise ValueError(
                f"rank {rank}: hvd.join() cannot be used with LBFGS, which averages the loss of its closure over all "
                "ranks: let every rank take the same number of steps"
            )
        if self._handles:
            raise ValueError(f"rank {rank}: hvd.join() between backward() and step(): call it after step()")

        def after_step() -> None:
            if frozen and any(exchange.anywhere(frozen, "hvd.join()")):
                raise RuntimeError(
                    "a frozen parameter began to require gradients meanwhile: unfreeze it after hvd.join()"
                )
            take_part_in_step(exchange)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                process.abort(f"failed in the other ranks' steps while it was in hvd.join(): {error!r}")

        return exchange.worker.join(after_step, ended)


def _take_from_horovod(p: torch.Tensor, handle: Any) -> None:
    output = handle() if callable(handle) else hvd.synchronize(handle)
    assert p.grad is not None
    if p.grad.is_sparse:
        p.grad.zero_().add_(output)
    else:
        p.grad.set_(output)


def _user_groups(groups: int | list[list[torch.Tensor]] | None, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the number of the user's group for the id of each parameter that is in one."""
    if not groups:
        return {}
    lists = groups if isinstance(groups, list) else split_list(list(parameters), groups)
    return {id(p): number for number, group in enumerate(lists) for p in group}


def _no_gradient(p: torch.Tensor, sparse: bool) -> torch.Tensor:
    """Return a zero gradient, for a parameter whose gradient other ranks may have."""
    if not sparse:
        return torch.zeros_like(p)
    no_rows = torch.empty(1, 0, dtype=torch.int64, device=p.device)
    no_values = p.detach().new_empty(0, *p.shape[1:])
    return torch.sparse_coo_tensor(no_rows, no_values, p.shape, device=p.device, check_invariants=True)


@functools.cache
def _report_cycle_time() -> None:
    """Log once what Horovod's thread costs. It exchanges nothing of ours, but spins until all ranks have woken up."""
    _LOG.info(
        "rank 0: this node's ranks have no cores to spare, and Horovod's background thread wakes up every millisecond: "
        "HOROVOD_CYCLE_TIME=10 lets it sleep for 10 ms, which an operation of Horovod itself may then wait for"
    )

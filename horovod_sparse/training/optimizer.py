"""DistributedOptimizer: Horovod's own optimizer, whose gradients travel sparse."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer as _Horovod
from mpi4py import MPI
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.compression import Sparse
from horovod_sparse.mpi.agreement import agree
from horovod_sparse.mpi.lifetime import inside_mpi
from horovod_sparse.mpi.traffic import Traffic
from horovod_sparse.training.arguments import parameter_facts
from horovod_sparse.training.communicator import communicator
from horovod_sparse.training.device import device_of
from horovod_sparse.training.exchange import Exchange
from horovod_sparse.training.horovod import facts, let_join, numbered
from horovod_sparse.training.layout import Member
from horovod_sparse.watchdog.abort import abort
from horovod_sparse.watchdog.report import Limits, limits

_LIBRARIES = ("horovod_sparse", "horovod", "torch")
_SHOWN = 3  # names of parameters that a message holds
# The optimizer that each parameter's hooks belong to.
_owners: Any = WeakTensorKeyDictionary()


class _Overrides:
    """Differences from Horovod's optimizer; everything not named here is Horovod's.

    Horovod builds its class from the user's optimizer and the functions of ``_DistributedOptimizer``, which call
    ``super(self.__class__, self)``: the class can have no subclass. So these functions are laid over Horovod's in the
    same way, and reach the ones they replace as ``_Horovod.name(self, ...)``.
    """

    # A gradient on its way: as it was handed in, and its version then; or Horovod's handle; or None, when the backward
    # passes of this step are not all done.
    _handles: dict[torch.Tensor, tuple[Any, Any]]
    _parameter_names: dict[torch.Tensor, str]
    _allreduce_delay: dict[torch.Tensor, int]
    _requires_update: set[torch.Tensor]
    _synchronized: bool
    _should_synchronize: bool
    _sparse_allreduce_grad_async: Callable[..., tuple[Any, Any]]
    op: Any
    sparse_as_dense: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]
    process_set: Any

    def __init__(
        self,
        params: Any,
        named_parameters: Any,
        sparse: Sparse,
        comm: MPI.Intracomm | None,
        grad_scaler: torch.amp.GradScaler | None,
        stall: Limits,
        **of_horovod: Any,
    ) -> None:
        self._sparse = sparse
        self._comm = comm
        self._exchange: Exchange | None = None
        self._hooks: list[Any] = []
        self._frozen: list[torch.Tensor] = []  # parameters that have learned on no rank so far
        self._sparse_gradients: set[torch.Tensor] = set()  # parameters whose gradient is a sparse tensor
        self._densified: dict[torch.Tensor, torch.Tensor] = {}  # those of this step
        self._newer: weakref.ref[Any] | None = None  # the optimizer that has taken parameters over
        if comm is not None:
            factor = 1.0 if of_horovod["op"] == hvd.Sum else 1.0 / comm.Get_size()
            self._exchange = Exchange(sparse, comm, weakref.proxy(self), factor, grad_scaler, stall)
        _Horovod.__init__(self, params, named_parameters, hvd.Compression.none, **of_horovod)

    def _register_hooks(self) -> None:
        """Called by Horovod's constructor where there is more than one rank."""
        if self._exchange is None or self._exchange.ranks == 1:
            return  # a process set of one rank has nothing to exchange
        self._admit([p for group in self.param_groups for p in group["params"]])
        if self.process_set.process_set_id == hvd.global_process_set.process_set_id:
            let_join(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as ``torch.optim.Optimizer.add_param_group`` does; they are exchanged, too.

        A collective call: all ranks of the process set add the same parameters, between two steps.

        Raises:
            ValueError: The parameters differ between ranks.
            RuntimeError: Called between backward() and step().
        """
        super(self.__class__, self).add_param_group(param_group)  # type: ignore[misc]
        if not hasattr(self, "_requires_update"):
            return  # in the constructor, before Horovod's part
        if self._handles:
            raise RuntimeError(
                f"rank {hvd.rank()}: add_param_group() between backward() and step(): call it after step()"
            )
        added = set(self.param_groups[-1]["params"])
        for name, p in numbered(self):  # type: ignore[arg-type]
            if p in added:
                self._parameter_names.setdefault(p, name)
                self._allreduce_delay.setdefault(p, self.backward_passes_per_step)
        if self._exchange is not None and self._comm is not None and self._exchange.ranks > 1:
            named = [(self._parameter_names[p], p) for p in self.param_groups[-1]["params"]]
            with inside_mpi("add_param_group()"):
                agree(self._comm, {"parameter": parameter_facts(named)})
            self._admit(self.param_groups[-1]["params"])

    def _admit(self, parameters: Sequence[torch.Tensor]) -> None:
        """Lets parameters take part that learn, and notes the others."""
        self._take_over(parameters)
        self._frozen += [p for p in parameters if not p.requires_grad]
        self._place([p for p in parameters if p.requires_grad])

    def _place(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives parameters places in buckets, and hooks."""
        assert self._exchange is not None
        self._exchange.add(_members(self, parameters))
        self._requires_update.update(parameters)
        hook = _hook(weakref.ref(self))
        learning: list[Any] = [p for p in parameters if p.requires_grad]
        self._hooks += [p.register_post_accumulate_grad_hook(hook) for p in learning]

    def _take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """Ends the exchange of an optimizer that the same parameters belonged to: two would exchange each gradient."""
        for older in {_owners[p]() for p in parameters if p in _owners} - {None, self}:
            older._hand_over(self)
            warnings.warn(
                f"rank {hvd.rank()}: parameters that another DistributedOptimizer exchanges were wrapped once more: "
                "from now on, only the new optimizer exchanges them, and the old one refuses to step",
                stacklevel=_user_level(),
            )
        _owners.update({p: weakref.ref(self) for p in parameters})

    def _hand_over(self, newer: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._newer = [], weakref.ref(newer)
        self._handles.clear()

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch that begins, as ``DistributedSampler.set_epoch`` is told.

        Needed by densities that depend on it, unless they count steps; harmless otherwise.

        Args:
            epoch: From 0; the same on every rank.
        """
        if self._exchange is not None:
            self._exchange.epoch = epoch

    def _accumulated(self, p: torch.Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""
        delay = self._allreduce_delay[p] - 1
        if delay < 0:
            raise AssertionError(
                f"rank {hvd.rank()}: the gradient of {self._parameter_names[p]} was computed more than "
                f"backward_passes_per_step={self.backward_passes_per_step} times before step(): raise it to accumulate "
                "gradients locally"
            )
        assert p.grad is not None
        assert not p.grad.requires_grad, (
            "backward(create_graph=True) keeps gradients in use that are exchanged in place"
        )
        self._allreduce_delay[p] = delay
        self._handles[p] = (None, None) if delay else self._allreduce_grad_async(p)

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Hands a gradient to its bucket; those that are not ours take Horovod's way."""
        assert self._exchange is not None
        worker = self._exchange.worker
        if p.grad is None:
            p.grad = _no_gradient(p, sparse=p in self._sparse_gradients and not self.sparse_as_dense)
        if p.grad.is_sparse:
            self._sparse_gradients.add(p)
            if not self.sparse_as_dense:
                return self._gather(p)
        if p not in worker:
            handle: tuple[Any, Any] = _Horovod._allreduce_grad_async(self, p)
            return handle
        gradient = p.grad
        if gradient.is_sparse:
            gradient = self._densified[p] = gradient.to_dense()
        # A frozen parameter's residual must not be flushed into it: it waits until the parameter learns again.
        worker.put(p, gradient, hold=not p.requires_grad)
        return p.grad, p.grad._version

    def _gather(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Leaves a sparse gradient to Horovod."""
        assert self._exchange is not None
        if not (device_of(p.device).horovod_reaches or hvd.cuda_built()):
            raise RuntimeError(
                f"rank {hvd.rank()}: {self._parameter_names[p]} on {p.device} has a sparse gradient, which is "
                "left to Horovod, but this Horovod was built without CUDA: give sparse_as_dense=True"
            )
        if p in self._exchange.worker:
            self._exchange.worker.leave_out(p)
        return self._sparse_allreduce_grad_async(p, self._parameter_names[p])

    def synchronize(self) -> None:
        """Completes the exchange; every ``p.grad`` then holds the reduced gradient.

        Raises:
            RuntimeError: No rank had a backward pass since the last step; raised on all ranks. Or gradients were
                changed while they were on their way.
        """
        exchange = self._exchange
        if exchange is None or exchange.ranks == 1:
            self._synchronized = True
            return
        if self._newer is not None:
            raise RuntimeError(
                f"rank {hvd.rank()}: parameters of this optimizer were wrapped once more, and a newer one exchanges "
                "them: use that one"
            )
        if self._synchronized and not self._handles:
            return  # the gradients are reduced already; to exchange them again would count them twice
        exchange.idle = not self._handles and all(p.grad is None for p in self._requires_update)
        try:
            self._hand_in(self._requires_update)
            exchange.worker.collect()
            if self._frozen:
                self._admit_learning(exchange)
            self._take_results()
        except BaseException:
            self._abandon()
            if exchange.idle:  # the zeros handed in are no gradients
                for p in self._requires_update:
                    p.grad = None
            raise
        finally:
            exchange.worker.finish()
            exchange.idle = False
        self._synchronized = True

    def _hand_in(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hands in what no hook has handed in: other ranks may have gradients of it."""
        for p in parameters:
            if self._handles.get(p, (None, None))[0] is None:
                self._handles[p] = self._allreduce_grad_async(p)

    def _admit_learning(self, exchange: Exchange) -> None:
        """Lets parameters take part that were frozen when the optimizer was made, and learn now on any rank."""
        learning = exchange.anywhere([p.requires_grad for p in self._frozen])
        new = [p for p, learns in zip(self._frozen, learning, strict=True) if learns]
        if not new:
            return
        self._frozen = [p for p, learns in zip(self._frozen, learning, strict=True) if not learns]
        self._place(new)
        self._hand_in(new)
        exchange.worker.collect()

    def _take_results(self) -> None:
        changed = []
        for p, (handle, version) in self._handles.items():
            self._allreduce_delay[p] = self.backward_passes_per_step
            if not isinstance(handle, torch.Tensor):
                _take_from_horovod(p, handle)
            elif p.grad is not handle or handle._version != version:
                changed.append(self._parameter_names[p])
            elif p in self._densified:
                handle.zero_().add_(self._densified[p].to_sparse())
        self._densified.clear()
        self._handles.clear()
        if changed:
            names = ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")
            raise RuntimeError(
                f"rank {hvd.rank()}: the gradients of {names} were changed between backward() and step(), while they "
                "were on their way to the other ranks: call optimizer.synchronize() first, then clip or unscale them, "
                "and step inside `with optimizer.skip_synchronize():`"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the reduced gradients, after ``synchronize()`` unless that was called already.

        What was exchanged counts from here on. Where a GradScaler leaves a step out, what was exchanged for it is
        undone before the next exchange, and before the state is saved.

        Args:
            closure: Evaluates the loss and calls backward(); each evaluation is followed by an exchange. LBFGS, which
                decides by the loss, is given the mean over the ranks.
        """
        if closure is not None:
            closure = self._exchanging(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() was called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "the gradients are exchanged once only, but say so: `with optimizer.skip_synchronize():`",
                    stacklevel=_user_level(),
                )
            self.synchronize()
        self._synchronized = False
        result = super(self.__class__, self).step(closure)  # type: ignore[misc]
        # With fused=True the scaler calls step() in any case and leaves the decision to torch's kernel.
        overflow = getattr(self, "found_inf", None)
        if self._exchange is not None and not (overflow is not None and overflow.item()):
            self._exchange.worker.confirm()
        return result

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which gradients are reduced."""

        def exchanged() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
            self._synchronized = False
            if self._comm is None or not isinstance(self, torch.optim.LBFGS):
                return loss
            with inside_mpi("step(closure)"):
                return self._comm.allreduce(float(loss)) / self._comm.Get_size()

        return exchanged

    def _abandon(self) -> None:
        """Makes ready for a next step after one that failed."""
        for handle, _ in self._handles.values():
            if isinstance(handle, int):  # Horovod's own: not waited for, its name would stay taken
                hvd.synchronize(handle)
        self._handles.clear()
        self._densified.clear()
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = self.backward_passes_per_step

    def _stand_in(self) -> None:
        """Takes part in the other ranks' steps, with nothing to give, while this rank is in ``hvd.join()``."""
        rank, exchange, frozen = hvd.rank(), self._exchange, [False] * len(self._frozen)
        assert exchange is not None
        if not exchange.worker.buckets:
            return
        if exchange.undoable:
            raise ValueError(
                f"rank {rank}: hvd.join() cannot go with a grad_scaler: this rank would not learn which steps the "
                "others skip: let every rank take as many steps (equal shares of the data, drop_last=True)"
            )
        if self._handles:
            raise ValueError(f"rank {rank}: hvd.join() between backward() and step(): call it after step()")

        def after_step() -> None:
            if frozen and any(exchange.anywhere(frozen)):
                raise RuntimeError(
                    "a parameter that was frozen began to learn meanwhile: let it learn after hvd.join()"
                )

        def ended(error: BaseException | None) -> None:
            if error is not None:
                abort(f"failed in the other ranks' steps, as it is in hvd.join(): {error!r}")

        exchange.worker.stand_in(after_step, ended)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Raises:
            AssertionError: Called between backward() and step() or synchronize().
        """
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are on their way to the other ranks"
            )
        # A step that was skipped after synchronize() is over now: this rank must meet the others in the next one.
        self._synchronized = False
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state; an exchange that was begun is completed first.

        Residuals are not part of it, as they differ from rank to rank: see ``load_compression_state_dict``.
        """
        if self._handles:
            self.synchronize()
        _Horovod.load_state_dict(self, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy would exchange the same parameters: there is none."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied, as it exchanges with the other ranks: copy "
            "optimizer.state_dict(), or copy the plain optimizer before it is wrapped"
        )

    @property
    def exchange(self) -> Exchange | None:
        """What remembers, between two steps; None where there is nothing to exchange.

        Raises:
            RuntimeError: Asked for between backward() and step().
        """
        if self._handles:
            raise RuntimeError(
                f"rank {hvd.rank()}: the state of the exchange was asked for between backward() and step(): ask for "
                "it after step()"
            )
        return self._exchange

    def compression_state_dict(self) -> dict[str, Any]:
        """Residuals and everything else the exchange remembers on this rank, as copies.

        Every rank has its own and must save its own: ``optimizer.state_dict()``, which users save on rank 0 and
        broadcast, does not hold it.

        Returns:
            Numbers, strings, lists and tensors only, so that ``torch.load(..., weights_only=True)`` reads it.

        With a GradScaler: call it after ``scaler.step()``. A step that was not applied until then is undone.

        Raises:
            RuntimeError: Called between backward() and step().
        """
        exchange = self.exchange
        return {"buckets": []} if exchange is None else exchange.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``compression_state_dict`` gave on the same rank of as many ranks.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
            RuntimeError: Called between backward() and step().
        """
        exchange = self.exchange
        try:
            if exchange is not None:
                exchange.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"rank {hvd.rank()}: {error}") from error

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self._sparse

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far, parameters that travel dense included."""
        return Traffic() if self._exchange is None else self._exchange.traffic


_OVERRIDES = {
    name: value
    for name, value in vars(_Overrides).items()
    # Horovod's broadcast_optimizer_state knows its optimizers by __module__: that must stay Horovod's.
    if name not in {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}
}


def DistributedOptimizer(  # noqa: N802 - the name and the arguments are Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> Any:
    """Wraps an optimizer so that its gradients are exchanged sparse, with error feedback.

    Takes the arguments of ``hvd.DistributedOptimizer``, with the same meaning. With ``hvd.Compression.none`` or
    ``.fp16`` the result is ``hvd.DistributedOptimizer``. A collective call: all ranks of the process set take part.

    A single process exchanges nothing and trains on its own gradients unchanged, as with Horovod.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``, or a compressor of Horovod's.
        backward_passes_per_step: Backward passes that are accumulated locally before each exchange.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: Accepted with Average. Sparse sums are float32 or wider and divided once, so that
            splitting the division changes nothing.
        num_groups: Horovod's deprecated name for an integer ``groups``.
        groups: A number of groups or a list of lists of parameters: each group is one bucket.
        sparse_as_dense: Treat sparse gradients (embeddings) as dense ones; otherwise Horovod gathers them.
        process_set: The ranks that exchange gradients.
        grad_scaler: The scaler that multiplies the loss. When its scale changes, residuals change with it, so that they
            stay the same as updates. When it skips a step, residuals and thresholds are as before that step, for which
            it takes a copy of them.
        stall_timeout: Seconds. When a bucket has waited so long for other ranks, each rank that waits logs a warning
            with the bucket, the stage and the missing ranks, and again after as many more; 0: never. By default
            ``HOROVOD_STALL_CHECK_TIME_SECONDS``, or 60.
        stall_abort: Seconds. When a bucket has waited so long, the same is printed and all ranks are ended; 0: never.
            By default ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, or 0. Sparse gradients, which Horovod
            exchanges itself, have Horovod's own stall check, which knows the two variables only.

    Returns:
        The optimizer, an instance of the wrapped optimizer's class. Beyond Horovod's methods it has
        ``set_epoch``, ``compression``, ``compression_state_dict``, ``load_compression_state_dict``,
        ``exchange`` and ``traffic``.

    Raises:
        ValueError: An argument is out of range, or differs between ranks.
        RuntimeError: Horovod runs without MPI, or MPI without threads.
    """
    if num_groups != 0:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    arguments = {
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    comm = communicator(process_set)
    named = None if named_parameters is None else list(named_parameters)
    if comm is not None:
        stall = {"stall_timeout": stall_timeout, "stall_abort": stall_abort}
        agree(comm, facts(optimizer, named, compression, {**arguments, **stall}))
    if isinstance(compression, Sparse):
        _warn_of_line_search(optimizer, compression)
        kind = type(optimizer)
        cls = type(kind.__name__, (kind,), {**vars(_Horovod), **_OVERRIDES})
        stall_limits = limits(stall_timeout, stall_abort)
        wrapped = cls(optimizer.param_groups, named, compression, comm, grad_scaler, stall_limits, **arguments)
    else:
        wrapped = hvd.DistributedOptimizer(optimizer, named, compression, **arguments)
    wrapped.state.update(optimizer.state)  # it may have trained before, or been loaded
    return wrapped


def _warn_of_line_search(optimizer: torch.optim.Optimizer, compression: Sparse) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and compression.density < 1:
        warnings.warn(
            f"rank {hvd.rank()}: LBFGS takes differences of gradients for curvature, but those of sparse gradients are "
            "mostly the selection's: use density=1, or an optimizer of first order",
            stacklevel=_user_level(),
        )


def _user_level() -> int:
    """The stacklevel of a warning of the caller that names the line of the program which called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _hook(optimizer: weakref.ref[Any]) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None:
            alive._accumulated(p)

    return hook


def _take_from_horovod(p: torch.Tensor, handle: Any) -> None:
    output = handle() if callable(handle) else hvd.synchronize(handle)
    assert p.grad is not None
    if p.grad.is_sparse:
        p.grad.zero_().add_(output)
    else:
        p.grad.set_(output)


def _members(optimizer: Any, parameters: Sequence[torch.Tensor]) -> list[Member]:
    """Those of some parameters that travel in buckets, in rank 0's order."""
    named = {optimizer._parameter_names[p]: p for p in parameters}
    in_order = [named[name] for name in optimizer._exchange.order(list(named))]
    group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    together = _together(optimizer._groups, in_order)
    least = optimizer._sparse.dense_below
    return [
        Member(optimizer._parameter_names[p], p, group_of[p], together.get(p), dense=p.numel() < least)
        for p in in_order
        if p.is_floating_point() and p.numel()
    ]


def _together(
    groups: int | list[list[torch.Tensor]] | None, parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, int]:
    """Number of the group of each parameter that the user put into one."""
    if not groups:
        return {}
    lists = groups if isinstance(groups, list) else split_list(list(parameters), groups)
    return {p: number for number, group in enumerate(lists) for p in group}


def _no_gradient(p: torch.Tensor, sparse: bool) -> torch.Tensor:
    """A zero gradient: another rank may have a real one."""
    if not sparse:
        return torch.zeros_like(p)
    no_rows = torch.empty(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(no_rows, p.detach().new_empty(0, *p.shape[1:]), p.shape, check_invariants=True)

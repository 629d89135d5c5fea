"""DistributedOptimizer: Horovod's own optimizer, whose gradients travel sparse."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer as _Horovod
from mpi4py import MPI

from horovod_sparse.compression import Sparse
from horovod_sparse.mpi.agreement import agree
from horovod_sparse.mpi.traffic import Traffic
from horovod_sparse.rules import Step
from horovod_sparse.training.arguments import facts
from horovod_sparse.training.bucket import Bucket
from horovod_sparse.training.communicator import communicator
from horovod_sparse.training.device import device_of
from horovod_sparse.training.layout import Member, plan
from horovod_sparse.training.worker import Worker
from horovod_sparse.watchdog.abort import abort_on_error
from horovod_sparse.watchdog.report import Limits, limits
from horovod_sparse.watchdog.watch import Watch


class _Overrides:
    """Differences from Horovod's optimizer; everything not named here is Horovod's.

    Horovod builds its class from the user's optimizer and the functions of ``_DistributedOptimizer``, which call
    ``super(self.__class__, self)``: the class can have no subclass. So these functions are laid over Horovod's in the
    same way, and reach the ones they replace as ``_Horovod.name(self, ...)``.
    """

    _handles: dict[Any, tuple[Any, Any]]
    _parameter_names: dict[torch.Tensor, str]
    _allreduce_delay: dict[torch.Tensor, int]
    _synchronized: bool
    _sparse_allreduce_grad_async: Callable[..., tuple[Any, Any]]
    op: Any
    sparse_as_dense: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

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
        self._grad_scaler = grad_scaler
        self._stall = stall
        self._epoch: int | None = None
        self._idle = False  # gradients are collected although this rank had no backward pass
        self._comm = comm
        self._ranks = 1 if comm is None else comm.Get_size()  # a rank that leaves ends MPI: it is not asked later
        self._worker = Worker([], self._conditions)
        self._sparse_gradients: set[torch.Tensor] = set()  # parameters whose gradient is a sparse tensor
        _Horovod.__init__(self, params, named_parameters, hvd.Compression.none, **of_horovod)

    def _register_hooks(self) -> None:
        """Called by Horovod's constructor where there is more than one rank."""
        assert self._comm is not None
        if self._ranks == 1:
            return  # a process set of one rank has nothing to exchange
        members = _members(self)
        layouts = plan(members, self._sparse.bucket_bytes)
        undoable = self._grad_scaler is not None and self._grad_scaler.is_enabled()
        factor = 1.0 if self.op == hvd.Sum else 1.0 / self._ranks
        buckets = [Bucket(layout, self._sparse, self._comm, factor, undoable) for layout in layouts]
        self._worker = Worker(buckets, self._conditions, undoable)
        names = [layout.names for layout in layouts]
        Watch(self._comm, weakref.WeakMethod(self._worker.progress), names, self._stall)
        self._groups = None  # grouped allreduce takes no callables as handles; the groups are buckets now
        _Horovod._register_hooks(self)

    def _conditions(self, group: int) -> Callable[[], Step]:
        rate, epoch, idle = self.param_groups[group].get("lr"), self._epoch, self._idle

        def conditions() -> Step:
            # The scale lies on the device, and reading it waits for the device. It changes between steps only.
            scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
            return Step(1.0 if rate is None else float(rate), scale, epoch, idle)

        return conditions

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch that begins, as ``DistributedSampler.set_epoch`` is told.

        Needed by densities that depend on it, unless they count steps; harmless otherwise.

        Args:
            epoch: From 0; the same on every rank.
        """
        self._epoch = epoch

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Hands a gradient to its bucket; those that are not ours take Horovod's way."""
        worker = self._worker
        if p.grad is None:
            p.grad = _no_gradient(p, sparse=p in self._sparse_gradients and not self.sparse_as_dense)
        if p.grad.is_sparse:
            self._sparse_gradients.add(p)
            if not self.sparse_as_dense:
                if not (device_of(p.device).horovod_reaches or hvd.cuda_built()):
                    raise RuntimeError(
                        f"rank {hvd.rank()}: {self._parameter_names[p]} on {p.device} has a sparse gradient, which is "
                        "left to Horovod, but this Horovod was built without CUDA: give sparse_as_dense=True"
                    )
                if p in worker:
                    worker.leave_out(p)
                return self._sparse_allreduce_grad_async(p, self._parameter_names[p])
        if p in worker:
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            # A frozen parameter's residual must not be flushed into it: it waits until the parameter learns again.
            return worker.put(p, gradient, hold=not p.requires_grad), None
        handle: tuple[Any, Any] = _Horovod._allreduce_grad_async(self, p)
        return handle

    def synchronize(self) -> None:
        """Completes the exchange; every ``p.grad`` then holds the reduced gradient.

        Raises:
            RuntimeError: No rank had a backward pass since the last step. Raised on all ranks.
        """
        worker = self._worker
        if not worker.buckets:
            _Horovod.synchronize(self)
            return
        if self._synchronized and not self._handles:
            return  # the gradients are reduced already; to exchange them again would count them twice
        self._idle = not self._handles
        try:
            _Horovod.synchronize(self)
        except BaseException:
            self._abandon()
            raise
        finally:
            worker.finish()
            self._idle = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the reduced gradients, after ``synchronize()`` unless that was called already.

        What was exchanged counts from here on. Where a GradScaler leaves a step out, what was exchanged for it is
        undone before the next exchange, and before the state is saved.
        """
        result = _Horovod.step(self, closure)
        # With fused=True the scaler calls step() in any case and leaves the decision to torch's kernel.
        overflow = getattr(self, "found_inf", None)
        if not (overflow is not None and overflow.item()):
            self._worker.confirm()
        return result

    def _abandon(self) -> None:
        """Makes ready for a next step after one that failed."""
        for handle, _ in self._handles.values():
            if isinstance(handle, int):  # Horovod's own: not waited for, its name would stay taken
                hvd.synchronize(handle)
        self._handles.clear()
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = self.backward_passes_per_step

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
        if self._worker.buckets and self._handles:
            self.synchronize()
        _Horovod.load_state_dict(self, state_dict)

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
        self._settle("compression_state_dict")
        return self._worker.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``compression_state_dict`` gave on the same rank of as many ranks.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
            RuntimeError: Called between backward() and step().
        """
        self._settle("load_compression_state_dict")
        try:
            self._worker.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"rank {hvd.rank()}: {error}") from error

    def merge_compression_states(
        self, states: Sequence[dict[str, Any]], leader: dict[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """The state that goes on from those of another number of ranks; the sum of the residuals stays what it was.

        Args:
            states: Those that this rank takes over, as ``compression_state_dict`` gave them; there may be none.
            leader: The old rank 0's, in which memories may be left out.

        Returns:
            A state for ``load_compression_state_dict``, and notes on what has not been carried over.

        Raises:
            ValueError: A state belongs to another model, bucket size or configuration.
            RuntimeError: Called between backward() and step().
        """
        self._settle("merge_compression_states")
        return self._worker.merge(states, leader)

    def _settle(self, what: str) -> None:
        if self._handles:
            raise RuntimeError(f"rank {hvd.rank()}: {what}() between backward() and step(): call it after step()")
        self._worker.settle()

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self._sparse

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far, parameters that travel dense included."""
        return self._worker.traffic


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
        ``merge_compression_states`` and ``traffic``.

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
    if not isinstance(compression, Sparse):
        return hvd.DistributedOptimizer(optimizer, named, compression, **arguments)
    if comm is not None and comm.Get_size() > 1:
        abort_on_error()
    kind = type(optimizer)
    cls = type(kind.__name__, (kind,), {**vars(_Horovod), **_OVERRIDES})
    stall_limits = limits(stall_timeout, stall_abort)
    return cls(optimizer.param_groups, named, compression, comm, grad_scaler, stall_limits, **arguments)


def _members(optimizer: Any) -> list[Member]:
    """The parameters that travel in buckets, in rank 0's order, the last layer first as backward reaches it."""
    names: dict[torch.Tensor, str] = optimizer._parameter_names
    group_of = {
        p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"] if p.requires_grad
    }
    order: list[str] = optimizer._comm.bcast([names[p] for p in group_of])
    parameter_of = {names[p]: p for p in group_of}
    parameters = [parameter_of[name] for name in order]
    together = _together(optimizer._groups, parameters)
    least = optimizer._sparse.dense_below
    return [
        Member(names[p], p, group_of[p], together.get(p), dense=p.numel() < least)
        for p in reversed(parameters)
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

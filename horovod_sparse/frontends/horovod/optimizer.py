"""DistributedOptimizer: Horovod's own optimizer, whose gradients travel sparse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.optimizer import _DistributedOptimizer as _Horovod

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.frontends.horovod.arguments import facts, user_level
from horovod_sparse.frontends.horovod.gradients import Gradients
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.traffic import Traffic


class _Optimizer(Gradients):
    """Differences from Horovod's optimizer; everything not named here or in ``Gradients`` is Horovod's.

    Horovod builds its class from the user's optimizer and the functions of ``_DistributedOptimizer``, which call
    ``super(self.__class__, self)``: the class can have no subclass. So these functions are laid over Horovod's in the
    same way, and reach the ones they replace as ``_Horovod.name(self, ...)``.
    """

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch that begins, as ``DistributedSampler.set_epoch`` is told.

        Needed by densities that depend on it, unless they count steps; harmless otherwise.

        Args:
            epoch: From 0; the same on every rank.
        """
        self.epoch = epoch

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
            if self._synchronized and not self._complete:
                warnings.warn(
                    # Begins as Horovod's own does: scripts may filter it.
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are exchanged once only, but say so: `with "
                    "optimizer.skip_synchronize():`",
                    stacklevel=user_level(),
                )
            self.synchronize()
        self._synchronized = self._complete = False
        result = super(self.__class__, self).step(closure)  # type: ignore[misc]
        # With fused=True the scaler calls step() in any case and leaves the decision to torch's kernel.
        overflow = getattr(self, "found_inf", None)
        if self._exchange is not None and not (overflow is not None and overflow.item()):
            self._exchange.worker.confirm()
        return result

    # Torch calls an optimizer's step hooks around the step of the user's class, once, and when the gradients are there.
    step.hooked = True  # type: ignore[attr-defined]

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which gradients are reduced."""

        def exchanged() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
            self._synchronized = False
            if self._exchange is None or not isinstance(self, torch.optim.LBFGS):
                return loss
            transport = self._exchange.transport
            mine = loss.item() if isinstance(loss, torch.Tensor) else loss
            with process.communicating("step(closure)", transport):
                return float(transport.allreduce(np.array([mine]))[0]) / transport.size

        return exchanged

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
        self._synchronized = self._complete = False
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
        """The exchange and what it remembers, between two steps; None where this rank takes no part.

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

    def statistics(self, *, norms: bool = False) -> dict[str, float]:
        """Numbers of what was exchanged since the last call, for any logger.

        Of this rank, each bucket (``bucket0/density``) and all together (``total/density``); docs/watch.md explains
        each. Counting them costs next to nothing; norms cost two passes over the gradients in one step.

        Args:
            norms: Take norms in the next step. The call after it has them: ``total/gradient_norm``,
                ``total/residual_norm``, ``total/gain`` and those of the buckets.

        Returns:
            Plain numbers; nothing where there was no step, or one rank alone.

        Raises:
            RuntimeError: Called between backward() and step().
        """
        exchange = self.exchange
        return {} if exchange is None else exchange.worker.statistics(norms)

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
    for part in (Gradients, _Optimizer)
    for name, value in vars(part).items()
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
    residual_unit: str | None = None,
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
        residual_unit: What a residual stays the same as when the learning rate changes: "update" for optimizers whose
            steps are learning rate times gradient, such as SGD; "gradient" for those that divide by the gradients' own
            scale, such as Adam. None: by the optimizer's class; one that is not torch's counts as the latter if its
            param groups have ``betas`` or ``eps``.
        stall_timeout: Seconds. When a bucket has waited so long for other ranks, each rank that waits logs a warning
            with the bucket, the stage and the missing ranks, and again after as many more; 0: never. By default
            ``HOROVOD_STALL_CHECK_TIME_SECONDS``, or 60.
        stall_abort: Seconds. When a bucket has waited so long, the same is printed and all ranks are ended; 0: never.
            By default ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, or 600, but twice the timeout at least. Sparse
            gradients, which Horovod exchanges itself, have Horovod's own stall check, which knows the two variables
            only.

    Returns:
        The optimizer, an instance of the wrapped optimizer's class. Beyond Horovod's methods it has
        ``set_epoch``, ``compression``, ``compression_state_dict``, ``load_compression_state_dict``,
        ``exchange``, ``statistics`` and ``traffic``.

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
    named = None if named_parameters is None else list(named_parameters)
    own = {"stall_timeout": stall_timeout, "stall_abort": stall_abort, "residual_unit": residual_unit}
    with process.communicating("DistributedOptimizer()"):
        transport = transport_of(process_set)
        if transport is not None:
            agree(transport, facts(optimizer, named, compression, {**arguments, **own}))
    if isinstance(compression, Sparse):
        _warn_of_line_search(optimizer, compression)
        kind = type(optimizer)
        cls = type(kind.__name__, (kind,), {**vars(_Horovod), **_OVERRIDES})
        of_exchange = (compression, transport, grad_scaler, residual_unit, limits(stall_timeout, stall_abort))
        wrapped = cls(optimizer.param_groups, named, *of_exchange, **arguments)
    else:
        wrapped = hvd.DistributedOptimizer(optimizer, named, compression, **arguments)
    wrapped.state.update(optimizer.state)  # it may have trained before, or been loaded
    return wrapped


def _warn_of_line_search(optimizer: torch.optim.Optimizer, compression: Sparse) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and compression.density < 1:
        warnings.warn(
            f"rank {hvd.rank()}: LBFGS takes differences of gradients for curvature, but those of sparse gradients are "
            "mostly the selection's: use density=1, or an optimizer of first order",
            stacklevel=user_level(),
        )

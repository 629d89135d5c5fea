"""DistributedOptimizer: Horovod's optimizer with a sparse gradient exchange."""

from __future__ import annotations

import logging
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
from horovod_sparse.frontends.arguments import agree_on
from horovod_sparse.frontends.base import ExchangingGradients
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.horovod.arguments import facts, user_level
from horovod_sparse.frontends.horovod.gradients import Gradients
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.frontends.wrapping import functions_of, warn_of_hidden, wrapped

_LOG = logging.getLogger("horovod_sparse")


class _Optimizer(Gradients):
    """Functions that differ from Horovod's optimizer; everything not defined here or in ``Gradients`` is Horovod's.

    Horovod builds its class from the user's optimizer class and the functions of ``_DistributedOptimizer``. These call
    ``super(self.__class__, self)``, so the class cannot have subclasses. The functions here therefore override
    Horovod's in the same way, and call them as ``_Horovod.name(self, ...)``.
    """

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the reduced gradients; calls ``synchronize()`` first unless that has been done.

        If a GradScaler skips a step, the changes of residuals and thresholds are undone before the next exchange or
        before the state is saved.

        Args:
            closure: Function that computes the loss and calls backward(); each evaluation is followed by an exchange.
                LBFGS, whose decisions depend on the loss, gets the mean loss over the ranks.
        """
        if closure is not None:
            closure = self._with_exchange(closure)
        elif self._should_synchronize:
            if self._already_synchronized() and not self._completed_by_scaler:
                warnings.warn(
                    # Starts like Horovod's warning, which scripts may filter.
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are exchanged only once, but use `with "
                    "optimizer.skip_synchronize():`",
                    stacklevel=user_level(),
                )
            self.synchronize()
        self._synchronized = self._completed_by_scaler = False
        return super(self.__class__, self).step(closure)  # type: ignore[misc]

    # Torch then calls step hooks only around the step of the user's class, where the gradients are reduced.
    step.hooked = True  # type: ignore[attr-defined]
    # To find the user's step, ``optimizers`` looks behind functions with this mark.
    step.of_front_end = True  # type: ignore[attr-defined]

    def _with_exchange(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also reduces the gradients."""

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

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Clear the gradients, as ``zero_grad`` of the wrapped optimizer.

        Raises:
            AssertionError: Called between backward() and step() or synchronize().
        """
        if self._handles:
            raise AssertionError(
                f"rank {hvd.rank()}: optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): the gradients are being exchanged with the other ranks"
            )
        # A step that was skipped after synchronize() ends here; the next one must exchange gradients again.
        self._synchronized = self._completed_by_scaler = False
        return super(self.__class__, self).zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; completes an exchange in progress first.

        Residuals are not included, as they differ between ranks: see ``load_compression_state_dict``.
        """
        if self._handles:
            self.synchronize()
        _Horovod.load_state_dict(self, state_dict)

    @property
    def exchange(self) -> GradientExchange | None:
        """Exchange of the gradients and its state, between two steps; None if this rank takes no part.

        Raises:
            RuntimeError: Read between backward() and step().
        """
        return self._finished_exchange()

    def _finished_exchange(self) -> GradientExchange | None:
        if self._handles:
            raise RuntimeError(
                f"rank {hvd.rank()}: the state of the exchange was read between backward() and step(): read it after "
                "step()"
            )
        return self._exchange

    def compression_state_dict(self) -> dict[str, Any]:
        """Return a copy of the exchange's state on this rank: residuals, thresholds and everything else it remembers.

        The state differs between ranks, and every rank must save its own. It is not part of
        ``optimizer.state_dict()``, which scripts usually save on rank 0 and broadcast. With a GradScaler, call this
        after ``scaler.step()``: a step that has not been applied yet is undone.

        Returns:
            Numbers, strings, lists and tensors only, so that ``torch.load(..., weights_only=True)`` can read it.

        Raises:
            RuntimeError: Called between backward() and step().
        """
        exchange = self.exchange
        return {"buckets": []} if exchange is None else exchange.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``compression_state_dict`` returned on the same rank of the same world size.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
            RuntimeError: Called between backward() and step().
        """
        exchange = self.exchange
        if exchange is not None:
            exchange.load_state_dict(state)


_FUNCTIONS = {**vars(_Horovod), **functions_of(Gradients, _Optimizer)}


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
    undoable: bool = False,
    residual_unit: str | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> Any:
    """Wrap an optimizer so that its gradients are exchanged sparse, with error feedback.

    Replaces ``hvd.DistributedOptimizer`` and takes its arguments, with the same meaning. During the backward pass, each
    rank adds its gradients to its residuals, sends the entries that the compression selects, and keeps the rest in the
    residuals for later steps. ``step()`` waits for the exchange and applies the reduced gradients, which have the same
    bits on every rank.

    A collective call: all ranks of the process set take part. A single rank exchanges nothing and trains on its own
    gradients. With ``hvd.Compression.none`` or ``.fp16`` the result is ``hvd.DistributedOptimizer``.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``, or a Horovod compressor.
        backward_passes_per_step: Number of backward passes that are accumulated locally before each exchange.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: Allowed with ``hvd.Average`` only, and without effect on sparse gradients: sums are
            formed in float32 or wider, and divided once.
        num_groups: Horovod's deprecated name for an integer ``groups``.
        groups: Number of groups, or a list of lists of parameters. Each group becomes one bucket.
        sparse_as_dense: Treat sparse gradients (embeddings) as dense. Otherwise Horovod gathers them.
        process_set: The ranks that exchange gradients.
        grad_scaler: The scaler of the loss. When its scale changes, residuals are rescaled, so that they stay the same
            as updates. When it skips a step, residuals and thresholds return to their state before that step, for which
            a copy is kept.
        undoable: Whether exchanged gradients may be cleared without a step of the optimizer, as in the training of a
            GAN. The residuals then return to their state before the exchange, for which a copy is kept: 4 bytes for
            each parameter, 8 with ``memory="momentum"``. Otherwise the next backward pass raises an error.
        residual_unit: What stays the same when the learning rate changes. "update": learning rate times residual, for
            optimizers that apply learning rate times gradient, such as SGD. "gradient": the residual, for optimizers
            that normalize the scale of the gradients, such as Adam. None: chosen by the optimizer's class; classes
            outside of torch get "gradient" if their param groups have ``betas`` or ``eps``.
        stall_timeout: Seconds that a bucket waits for other ranks before this rank logs a warning with the bucket, the
            stage and the missing ranks; repeated at the same interval. 0: never. None:
            ``HOROVOD_STALL_CHECK_TIME_SECONDS``, by default 60.
        stall_abort: Seconds that a bucket waits for other ranks before the same report is printed and all ranks are
            ended. 0: never. None: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, by default 600 or twice ``stall_timeout``,
            whichever is longer. Sparse gradients that Horovod gathers have Horovod's own stall check, which only reads
            the two variables.

    Returns:
        The optimizer, an instance of the wrapped optimizer's class. In addition to Horovod's methods it has
        ``set_epoch``, ``compression``, ``compression_state_dict``, ``load_compression_state_dict``, ``discard``,
        ``reset``, ``exchange``, ``statistics`` and ``traffic``.

    Raises:
        ValueError: An argument is out of range, or differs between ranks.
        RuntimeError: Horovod runs without MPI, or MPI without ``MPI_THREAD_MULTIPLE``.
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
    own = {
        "stall_timeout": stall_timeout,
        "stall_abort": stall_abort,
        "residual_unit": residual_unit,
        "undoable": undoable,
    }
    with process.communicating("DistributedOptimizer()"):
        transport = transport_of(process_set)
        if transport is not None:
            agree_on(transport, lambda: facts(optimizer, named, compression, {**arguments, **own}))
    if isinstance(compression, Sparse):
        _warn_of_line_search(optimizer, compression)
        made = wrapped(optimizer, ExchangingGradients, _FUNCTIONS)
        of_exchange = (compression, transport, grad_scaler, undoable, residual_unit, limits(stall_timeout, stall_abort))
        made.__init__(optimizer.param_groups, named, *of_exchange, **arguments)
        warn_of_hidden(optimizer, made)
    else:
        scaled = grad_scaler is not None and grad_scaler.is_enabled()
        _report_unused({"grad_scaler": scaled, "undoable": undoable, "residual_unit": residual_unit})
        made = hvd.DistributedOptimizer(optimizer, named, compression, **arguments)
        made.state.update(optimizer.state)  # the optimizer may have been used before, or loaded
    return made


def _report_unused(arguments: dict[str, Any]) -> None:
    given = [name for name in arguments if arguments[name]]
    if given and hvd.rank() == 0:
        _LOG.warning(
            "rank 0: no effect of %s, as Horovod's compressors remember nothing between steps: where a GradScaler "
            "unscales gradients, call synchronize() before, and step() inside skip_synchronize()",
            ", ".join(given),
        )


def _warn_of_line_search(optimizer: torch.optim.Optimizer, compression: Sparse) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and compression.density < 1:
        warnings.warn(
            f"rank {hvd.rank()}: LBFGS estimates curvature from differences of gradients, which for sparse gradients "
            "mostly reflect the selection: use density=1, or a first-order optimizer",
            stacklevel=user_level(),
        )

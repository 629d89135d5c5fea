"""State and communication hook for one DDP model."""

# Without `from __future__ import annotations`: DDP checks the hook's annotations, which must be types, not strings.

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.engine.exchange import require_state
from horovod_sparse.engine.step import State
from horovod_sparse.engine.worker import Worker
from horovod_sparse.frontends.arguments import (
    agree_on,
    check_devices,
    check_optimizers,
    common_facts,
    names_in,
    optimizers_in,
    require_own,
    require_sparse,
)
from horovod_sparse.frontends.base import ExchangingGradients
from horovod_sparse.frontends.ddp.bucket import PendingBucket, gradients_of
from horovod_sparse.frontends.eager import eager, weak_hook
from horovod_sparse.frontends.exchange import GradientExchange, register_step_hooks
from horovod_sparse.frontends.members import job, transport_of
from horovod_sparse.frontends.passes import BackwardPass
from horovod_sparse.frontends.registry import standalone
from horovod_sparse.frontends.unapplied import begin_backward
from horovod_sparse.frontends.units import check_unit
from horovod_sparse.kernels import copy_to_host


class SparseState(ExchangingGradients):
    """State of ``sparse_hook``: the exchange of one DDP model, with its residuals.

    ::

        model = DistributedDataParallel(model)
        state = hvs.ddp.SparseState(hvs.Compression.oktopk(density=0.01), optimizer, model.named_parameters())
        model.register_comm_hook(state, hvs.ddp.sparse_hook)

    ``backward()`` then leaves the mean of what the ranks have sent in ``p.grad``, with the same bits on every rank.
    Entries that are not sent stay in the residuals for later steps. Each DDP model needs its own state.

    Construction exchanges nothing. In the first backward pass the ranks compare version, configuration and optimizers,
    and raise an error on all of them if these differ.

    Args:
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``.
        optimizer: The optimizer of the model, or a list of several; residuals follow their learning rates. For a
            wrapper, such as Accelerate's, pass the optimizer inside. The attribute may also be set later, before the
            first backward pass. None: residuals are kept in gradient units. Required by compressions that apply
            momentum: small parameters and the weight decay get their momentum in the optimizer's step.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``, with all that DDP
            exchanges. Messages and checkpoints use the names; their order is that of the parameters in buckets.
        process_group: The process group of the DDP model; None: all ranks.
        grad_scaler: The scaler of the loss, as for ``DistributedOptimizer``; needs exactly one optimizer.
        undoable: Whether exchanged gradients may be dropped, as for ``DistributedOptimizer``; needs an optimizer.
        residual_unit: "update" or "gradient", as for ``DistributedOptimizer``; None: by each optimizer's class.
        stall_timeout: Seconds before a stall is reported, as for ``DistributedOptimizer``.
        stall_abort: Seconds before a stall ends all ranks, as for ``DistributedOptimizer``.

    Raises:
        TypeError: The optimizer is not a torch optimizer, or is a wrapper without step hooks; or the names are not
            pairs.
        ValueError: An argument is out of range, or a name occurs twice.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]

    def __init__(
        self,
        compression: Sparse,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        process_group: distributed.ProcessGroup | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        undoable: bool = False,
        residual_unit: str | None = None,
        stall_timeout: float | None = None,
        stall_abort: float | None = None,
    ) -> None:
        require_sparse(compression, "register no hook")
        limits(stall_timeout, stall_abort)
        check_unit(residual_unit)
        self._sparse = compression
        self.optimizer = optimizer
        self._process_group = process_group
        self._names = names_in(named_parameters)
        self._pickled_with: dict[str, bool] = {}  # what an unpickled state had, and must be given again
        self._grad_scaler = grad_scaler
        self._undoable = undoable
        self._residual_unit = residual_unit
        self._stall = (stall_timeout, stall_abort)
        self._loaded: Mapping[str, Any] | None = None  # state to load once the buckets exist
        self._computed: set[str] = set()  # names of parameters with gradients since the last exchange
        self._pass = BackwardPass()  # begins with the first hook of a parameter
        self._joined = False  # whether DDP's join() took part in the last exchange, without a backward pass here
        # DDP buckets with parameters that have no bucket here so far, and their gradients.
        self._pending: list[tuple[PendingBucket, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        # First step: parameters of the model, until the optimizers have been compared with them.
        self._unchecked: dict[torch.Tensor, None] | None = {}
        standalone.add(self)

    def exchanged_parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose gradients are exchanged; empty if they are not known yet."""
        return super().exchanged_parameters() or self._names

    @property
    def named_parameters(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Pairs of name and parameter; must be set again on an unpickled state."""
        return tuple((name, p) for p, name in self._names.items())

    @named_parameters.setter
    def named_parameters(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._exchange is not None:
            raise ValueError("named_parameters must be set before the first backward pass: pass it to SparseState")
        self._names = names_in(given)

    @property
    def process_group(self) -> distributed.ProcessGroup | None:
        """The process group of the DDP model; None: all ranks."""
        return self._process_group

    @process_group.setter
    def process_group(self, given: distributed.ProcessGroup | None) -> None:
        if self._exchange is not None and given is not self._process_group:
            raise ValueError(
                f"rank {job().rank}: process_group must be set before the first backward pass: pass it to SparseState"
            )
        self._process_group = given

    @property
    def _group(self) -> distributed.ProcessGroup:
        """The process group of the model: the default one if none was given."""
        group = self._process_group or distributed.group.WORLD
        assert group is not None, "torch.distributed is not initialized"
        return group

    @property
    def optimizer(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """The optimizer of the model, or several."""
        given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = self._optimizer
        return given

    @optimizer.setter
    def optimizer(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        optimizers = optimizers_in(given)
        if self._exchange is not None and optimizers != self.optimizers:
            raise ValueError(
                f"rank {job().rank}: optimizer must be set before the first backward pass, as the exchange follows its "
                "steps: change the param groups of the old optimizer, or begin with a new DistributedDataParallel and "
                "SparseState"
            )
        self.optimizers = optimizers
        self._optimizer: Any = optimizers if isinstance(given, (list, tuple)) else given
        for optimizer in self.optimizers:
            # Not in the first backward pass, which may already be inside the first step, in a closure.
            register_step_hooks(optimizer, self.compression, None)

    def _receive(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a DDP bucket, and return the future of its results.

        The first one of a backward pass finishes the step before, the last one creates the buckets that are missing.
        """
        exchange = self._open({p.device for p in bucket.parameters()})
        if self._unchecked is not None:
            self._unchecked |= dict.fromkeys(bucket.parameters())
            if bucket.is_last():
                self._check_optimizers(exchange, self._unchecked)
                self._unchecked = None
        if bucket.index() == 0:
            exchange.require_groups()
            self._finish(exchange.worker)
            self._joined = bool(exchange.worker.keys) and not self._pass.in_progress
            if self._joined:
                exchange.worker.confirm()  # the step before: no optimizer of this rank takes another one
        buffer = bucket.buffer()
        if exchange.ranks == 1 or buffer.is_sparse or not buffer.is_floating_point():
            future: torch.futures.Future[torch.Tensor] = allreduce_hook(self._group, bucket)
        else:
            future = self._submit(exchange, bucket)
        if bucket.is_last():
            self._submit_pending(exchange)
            self._computed.clear()
        return future

    def _backward_begins(self, name: str, gradient: torch.Tensor) -> None:
        """Settle what became of the last exchange, before a backward pass changes gradients; a hook of parameters."""
        del gradient
        self._computed.add(name)
        assert self._exchange is not None
        if not self._pass.in_progress:
            self._pass.begin()
        if self._exchange.worker.step.state is State.EXCHANGING:
            self._finish(self._exchange.worker)
        begin_backward(self._exchange)

    def _finish(self, worker: Worker) -> None:
        """Finish the last exchange; after one in DDP's join(), only the other ranks' optimizers take a step."""
        if worker.step.active:
            worker.finish()
            if self._joined:
                worker.confirm()

    def _submit(self, exchange: GradientExchange, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        pending = PendingBucket(bucket.buffer(), exchange)
        pairs = [(p, gradient) for p, gradient in gradients_of(bucket) if p.numel()]
        if any(p not in exchange.names for p, _ in pairs):
            self._pending.append((pending, pairs))
        else:
            pending.submit(pairs, self._computed)
        return pending.future

    def _submit_pending(self, exchange: GradientExchange) -> None:
        """Create buckets for parameters that have none; called after the last DDP bucket of a backward pass."""
        pending, self._pending = self._pending, []
        if pending:
            self._create_buckets(exchange, {p for _, pairs in pending for p, _ in pairs if p not in exchange.names})
            # No hook has noted these yet.
            self._computed.update(self._names[p] for _, pairs in pending for p, _ in pairs)
            for one, pairs in pending:
                one.submit(pairs, self._computed)
        missing = exchange.worker.missing
        if missing:
            raise ValueError(
                f"rank {job().rank}: the state has buckets for {', '.join(missing[:3])}, which this DDP "
                "model does not exchange: give each model its own SparseState, with its named_parameters"
            )

    def _create_buckets(self, exchange: GradientExchange, parameters: Collection[torch.Tensor]) -> None:
        """Create buckets for parameters, in the order of the names; a collective call."""
        unnamed = [tuple(p.shape) for p in parameters if p not in self._names]
        if unnamed:
            raise ValueError(
                f"rank {job().rank}: named_parameters lacks {len(unnamed)} of the parameters that DDP exchanges, such "
                f"as one of shape {unnamed[0]}: pass the named_parameters() of the whole model, and give each model "
                "its own SparseState"
            )
        exchange.create_buckets({name: p for p, name in self._names.items() if p in parameters})
        if exchange.ranks > 1:
            for p in parameters:
                trained = p.requires_grad
                p.requires_grad_()  # torch refuses a hook of a parameter that was frozen in this step
                p.register_hook(weak_hook(self._backward_begins, self._names[p]))  # type: ignore[no-untyped-call]
                p.requires_grad_(trained)
        if self._loaded is not None:
            exchange.load_state_dict(self._loaded)
            self._loaded = None

    def _open(self, devices: Iterable[torch.device] = ()) -> GradientExchange:
        """Return the exchange; the first call is collective, compares the ranks' facts and creates it."""
        if self._exchange is None:
            transport = transport_of(self._group)
            assert transport is not None
            with process.communicating("SparseState", transport):
                agree_on(transport, lambda: self._facts(devices))
            me = weakref.proxy(self)
            self._exchange = GradientExchange(
                self.compression,
                transport,
                self.optimizers,
                1 / transport.size,
                limits(*self._stall),
                grad_scaler=self._grad_scaler,
                undoable=self._undoable,
                residual_unit=self._residual_unit,
                hold_zeros=True,
                without_exchange="inside model.no_sync()",
                between_steps=lambda: me._finished_exchange() is not None,  # not called in backward()
            )
            self._exchange.epoch = self._epoch
        return self._exchange

    def _facts(self, devices: Iterable[torch.device]) -> dict[str, Any]:
        """Return the facts that must be the same on every rank; raise ValueError for an error in them."""
        check_devices(devices)
        self._require_pickled_with()
        remedy = "pass it to SparseState, or set state.optimizer before the first backward pass"
        check_optimizers(self.compression, self.optimizers, self._grad_scaler, self._undoable, remedy)
        if not self._names:
            raise ValueError(
                "named_parameters holds no parameters: pass model.named_parameters(), an iterator that can be used once"
            )
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        named = [(str(number), p) for number, group in enumerate(groups) for p in group["params"]]
        facts = common_facts(
            self.compression, named, *self._stall, self._residual_unit, self.optimizers, self._undoable
        )
        return {**facts, "named_parameters": tuple(self._names.values())}

    def _check_optimizers(self, exchange: GradientExchange, of_model: Iterable[torch.Tensor]) -> None:
        """Raise on all ranks if an optimizer of any rank is not one of the model; a collective call."""
        error: ValueError | None = None
        try:
            require_own(self.optimizers, of_model, self._names)
        except ValueError as wrong:
            error = ValueError(f"rank {job().rank}: {wrong}")
        if exchange.anywhere([error is not None], "backward()")[0]:
            raise error or ValueError(
                f"rank {job().rank}: the optimizer of another rank does not belong to its DDP model; "
                "that rank's error has the details"
            )

    def _require_pickled_with(self) -> None:
        """Raise ValueError if an unpickled state lacks what it had."""
        now = self._given()
        for name, had in self._pickled_with.items():
            if had > now[name]:
                raise ValueError(
                    f"the state was pickled with {name}, which a pickle leaves out: set state.{name} again before the "
                    "first backward pass"
                )

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of the loss; must be set again on an unpickled state."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, given: torch.amp.GradScaler | None) -> None:
        if self._exchange is not None and given is not self._grad_scaler:
            raise ValueError("grad_scaler must be set before the first backward pass: pass it to SparseState")
        self._grad_scaler = given

    def _finished_exchange(self) -> GradientExchange | None:
        if self._exchange is not None:
            self._finish(self._exchange.worker)
        return self._exchange

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return a copy of everything that the exchange remembers on this rank; call it after ``optimizer.step()``.

        The state differs between ranks, and every rank must save its own.

        Args:
            copy: Copies an array to the host.

        Returns:
            Numbers, strings, lists and tensors only, so that ``torch.load(..., weights_only=True)`` can read it.
        """
        exchange = self._finished_exchange()
        if exchange is None or self._loaded is not None:
            return dict(self._loaded or {"buckets": []})
        return exchange.state_dict(copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration. Before the first step, when
                the parameters are not known yet, the first backward pass raises it instead.
        """
        require_state(state)
        exchange = self._finished_exchange()
        if exchange is not None and exchange.worker.keys:
            exchange.load_state_dict(state)
        else:
            self._loaded = state

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size, as ``Exchange.merge``; a collective call.

        Raises:
            ValueError: A state belongs to another model, bucket size or configuration.
        """
        self._finished_exchange()
        exchange = self._open()
        if not exchange.worker.keys:
            self._create_buckets(exchange, {p for p in self._names if p.requires_grad})
        return exchange.merge(states, leader)

    def __getstate__(self) -> dict[str, Any]:
        """Return configuration and the exchange's state, without process group, parameters, optimizer and scaler."""
        return {
            "compression": self.compression,
            "epoch": self._epoch,
            "undoable": self._undoable,
            "residual_unit": self._residual_unit,
            "stall": self._stall,
            "state": self.state_dict(),
            # An unpickled state that was not used yet passes on what its own pickle said.
            "had": self._pickled_with if self._exchange is None and self._pickled_with else self._given(),
        }

    def _given(self) -> dict[str, bool]:
        return {
            "named_parameters": bool(self._names),
            "optimizer": bool(self.optimizers),
            "grad_scaler": self._grad_scaler is not None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, in the default process group; parameters, optimizer and scaler must be set again."""
        timeout, abort = state["stall"]
        SparseState.__init__(
            self,
            state["compression"],
            None,
            (),
            undoable=state["undoable"],
            residual_unit=state["residual_unit"],
            stall_timeout=timeout,
            stall_abort=abort,
        )
        self._epoch = state["epoch"]
        self._pickled_with = state["had"]
        self._loaded = state["state"] if state["state"]["buckets"] else None


@eager
def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one DDP bucket with a sparse exchange; pass it to ``model.register_comm_hook`` with its state.

    Args:
        state: State of this model, not shared with other models.
        bucket: Gradients of the DDP bucket. Sparse tensors (embeddings) and tensors that are not of floating point are
            left to DDP's own allreduce.

    Returns:
        Future of the bucket's buffer, which then holds the mean over the ranks.
    """
    if not isinstance(bucket, GradBucket):
        raise RuntimeError(
            f"rank {job().rank}: DDP passes single gradients to its hooks, not buckets, because "
            "torch._dynamo.config.optimize_ddp is 'python_reducer': leave it at its default, True"
        )
    return state._receive(bucket)

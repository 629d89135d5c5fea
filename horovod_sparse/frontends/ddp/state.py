"""State and communication hook for one DDP model."""

# Without `from __future__ import annotations`: DDP looks at those of the hook, and wants types.

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.device import device_of
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Member
from horovod_sparse.engine.worker import Worker
from horovod_sparse.frontends.arguments import (
    check_devices,
    check_sparse,
    common_facts,
    names_in,
    optimizers_in,
    require_own,
    require_plain,
)
from horovod_sparse.frontends.conditions import Conditions
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.frontends.momentum import apply_momentum
from horovod_sparse.frontends.units import check_unit
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.mpi import job
from horovod_sparse.transport.traffic import Traffic


class _Delivery:
    """A bucket of DDP that waits for buckets of ours, which need not be the same.

    Args:
        buffer: Its memory, which results are written to.
        worker: Exchanges our buckets.
    """

    def __init__(self, buffer: torch.Tensor, worker: Worker) -> None:
        self._buffer = buffer
        self._worker = worker
        self._lock = threading.Lock()
        self._waiting = 1  # for all parameters to be handed in
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def submit(self, gradients: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
        """Submit all gradients of this bucket: key, gradient, and whether it is held."""
        collected = []
        for key, gradient, hold in gradients:
            bucket = self._worker.bucket_of(key)
            assert bucket is not None
            self._worker.put(bucket, key, gradient, hold)
            collected.append(bucket.collected)
        for step in dict.fromkeys(collected):
            with self._lock:
                self._waiting += 1
            step.done.add_done_callback(self._arrived)
        self._arrived()

    def _arrived(self, _: object = None) -> None:
        """One of the things that are waited for has happened; the last one lets DDP go on."""
        with self._lock:
            self._waiting -= 1
            complete = not self._waiting
        if complete:
            # On our stream, which DDP's then waits for.
            with device_of(self._buffer.device).work():
                if isinstance(self._worker.failed, Exception):
                    self.future.set_exception(self._worker.failed)  # type: ignore[arg-type]
                else:
                    self.future.set_result(self._buffer)


class SparseState:
    """State of ``sparse_hook``: the exchange of one DDP model, and what it remembers of each parameter.

    Nothing is exchanged when it is made. In the first backward pass the ranks compare what must be the same.

    Args:
        compression: Usually from ``hvs.Compression`` or ``hvs.parse``.
        optimizer: The optimizer of the model, or several. Residuals follow their learning rates. May be given later, as
            the attribute, before the first backward pass; without any, residuals stay as gradients. Give plain
            optimizers of torch: of a wrapper, such as Accelerate's, the one inside. A compression that
            applies momentum needs it: it applies that of small parameters and of the weight decay in the optimizer's
            step.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``: names for messages.
        process_group: That of the DDP model; None: all.
        grad_scaler: The scaler that multiplies the loss: as for ``DistributedOptimizer``. Needs the optimizer.
        residual_unit: "update" or "gradient", as for ``DistributedOptimizer``; None: by each optimizer's class.
        stall_timeout: Seconds, as for ``DistributedOptimizer``.
        stall_abort: Seconds, as for ``DistributedOptimizer``.

    Raises:
        TypeError: The optimizer is none of torch's, or a wrapper that takes no hooks.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        compression: Sparse,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        process_group: distributed.ProcessGroup | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        residual_unit: str | None = None,
        stall_timeout: float | None = None,
        stall_abort: float | None = None,
    ) -> None:
        if not isinstance(compression, Sparse):
            raise ValueError(
                f"unknown compression {compression!r}: give hvs.Compression.topka(density=0.01) or the like; for a "
                "dense exchange register no hook"
            )
        limits(stall_timeout, stall_abort)
        check_unit(residual_unit)
        self.compression = compression
        self._exchange: Exchange | None = None
        self.optimizer = optimizer
        self.epoch: int | None = None
        self.idle = False  # DDP's hook is called in a backward pass only
        self.process_group = process_group
        self._names = names_in(named_parameters)
        self._keys: dict[torch.Tensor, str] = {}  # of parameters with buckets
        self._names_by_position: dict[str, str] = {}  # of a pickled state, until parameters are known
        self._must_have: dict[str, bool] = {}  # whether optimizer and scaler have to be given again
        self._grad_scaler = grad_scaler
        self._residual_unit = residual_unit
        self._stall = (stall_timeout, stall_abort)
        self._loaded: Mapping[str, Any] | None = None  # a state for an exchange that is still to be made
        # Parameters without a place so far, in the first step, with their gradients.
        self._unplaced: list[tuple[torch.Tensor, torch.Tensor, _Delivery]] = []
        # Parameters of the model, in the first step, until the optimizers are compared with them.
        self._unchecked: dict[torch.Tensor, None] | None = {}

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch that begins, as ``DistributedSampler.set_epoch`` is told.

        Args:
            epoch: From 0; the same on every rank.
        """
        self.epoch = epoch

    @property
    def group(self) -> distributed.ProcessGroup:
        """The process group."""
        group = self.process_group or distributed.group.WORLD
        assert group is not None, "torch.distributed is not initialized"
        return group

    @property
    def optimizer(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """The optimizer of the model, or several."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        self._optimizers = optimizers_in(given)
        self._optimizer = given
        for optimizer in self.optimizers:
            # Not in the first backward pass: that may be inside of the first step already, in a closure.
            apply_momentum(optimizer, self.compression, None if self._exchange is None else self)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return list(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def optimizer_of(self, group: int) -> torch.optim.Optimizer:
        """The optimizer of a param group."""
        return [optimizer for optimizer in self.optimizers for _ in optimizer.param_groups][group]

    @property
    def ranks(self) -> int:
        """World size P."""
        assert self._exchange is not None
        return self._exchange.ranks

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """Return the bucket that exchanges the gradient of a parameter."""
        assert self._exchange is not None
        return self._exchange.worker.bucket_of(self._keys.get(parameter))

    def place_named(self, keys: Sequence[str]) -> None:
        """Do nothing: DDP exchanges all parameters that required gradients when it was constructed."""

    def _receive(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchange = self._open({p.device for p in bucket.parameters()})
        if self._unchecked is not None:
            self._unchecked |= dict.fromkeys(bucket.parameters())
            if bucket.is_last():
                self._check_optimizers(exchange, self._unchecked)
                self._unchecked = None
        if bucket.index() == 0 and exchange.worker.collecting:
            exchange.worker.finish()
        buffer = bucket.buffer()
        if exchange.ranks == 1 or buffer.is_sparse or not buffer.is_floating_point():
            future: torch.futures.Future[torch.Tensor] = allreduce_hook(self.group, bucket)
        else:
            future = self._submit(exchange.worker, bucket)
        if bucket.is_last():
            self._place(exchange)
        return future

    def _keyed(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        return ((self._keys[p], gradient, not p.requires_grad) for p, gradient in pairs)

    def _submit(self, worker: Worker, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        delivery = _Delivery(bucket.buffer(), worker)
        both = zip(bucket.parameters(), bucket.gradients(), strict=True)
        pairs = [(p, gradient) for p, gradient in both if p.numel()]
        if any(p not in self._keys for p, _ in pairs):
            self._unplaced += [(p, gradient, delivery) for p, gradient in pairs]
        else:
            delivery.submit(self._keyed(pairs))
        return delivery.future

    def _place(self, exchange: Exchange) -> None:
        """All buckets of DDP were there: gives parameters places that have none."""
        unplaced, self._unplaced = self._unplaced, []
        if unplaced:
            # DDP's buckets begin with the last layers, and have the order of the layers in themselves.
            deliveries = list(dict.fromkeys(delivery for *_, delivery in reversed(unplaced)))
            of_model = [p for one in deliveries for p, _, delivery in unplaced if delivery is one]
            self._add(exchange, [p for p in of_model if p not in self._keys])
            for one in reversed(deliveries):
                one.submit(self._keyed([(p, gradient) for p, gradient, delivery in unplaced if delivery is one]))
        missing = [key for bucket in exchange.worker.buckets for key in bucket.missing]
        if missing:
            raise ValueError(
                f"rank {job().rank}: the state has places for {', '.join(missing[:3])}, which this DDP "
                "model does not exchange: give each model a SparseState of its own, with its named_parameters"
            )

    def _add(self, exchange: Exchange, parameters: Sequence[torch.Tensor]) -> None:
        """Gives parameters places; a collective call."""
        groups = self.param_groups
        group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        position = {p: place for place, p in enumerate(group_of)}
        in_order = sorted(parameters, key=lambda p: position.get(p, len(position)))
        positions = self._positions() | {
            p: f"parameter {i}" for i, p in enumerate(in_order, len(self._keys)) if p not in group_of
        }
        given = {p: self._names_by_position[at] for p, at in positions.items() if at in self._names_by_position}
        self._names = given | self._names
        self._names_by_position |= {at: self._names[p] for p, at in positions.items() if p in self._names}
        named = {self._names.get(p, positions[p]): p for p in in_order}
        members = [
            Member.of(name, named[name], group_of.get(named[name], -1), least=self.compression.dense_below)
            for name in exchange.order(list(named))
            if named[name].numel()
        ]
        exchange.add(members)
        self._keys |= {named[member.key]: member.key for member in members}
        if self._loaded is not None:
            exchange.load_state_dict(self._loaded)
            self._loaded = None

    def _positions(self) -> dict[torch.Tensor, str]:
        """Positions of parameters in the optimizers; they serve as names where the user gives none, as in Horovod."""
        groups = enumerate(self.param_groups)
        return {p: f"{number}.{i}" for number, group in groups for i, p in enumerate(group["params"])}

    def _open(self, devices: Iterable[torch.device] = ()) -> Exchange:
        """The exchange; made, and agreed on, at the first call, which is collective."""
        if self._exchange is None:
            transport = transport_of(self.group)
            assert transport is not None
            with process.communicating("SparseState", transport):
                agree(transport, self._facts(devices))
            stall = limits(*self._stall)
            owner = Conditions(weakref.proxy(self), self.compression, self._residual_unit, transport.rank)
            factor, scaler = 1 / transport.size, self._grad_scaler
            exchange = Exchange(self.compression, transport, owner, factor, scaler, stall, hold_zeros=True)
            for optimizer in self.optimizers:
                optimizer.register_step_post_hook(_confirmation(weakref.ref(exchange.worker)))
            self._exchange = exchange
            for optimizer in self.optimizers:
                apply_momentum(optimizer, self.compression, self)
        return self._exchange

    def _facts(self, devices: Iterable[torch.device]) -> dict[str, Any] | Exception:
        """Facts that must be the same on every rank, or the error in them on this one."""
        try:
            check_devices(devices)
            self._require_given_again()
            check_sparse(self.compression, self.optimizers)
            for optimizer in self.optimizers:
                require_plain(optimizer)
            if self.compression.replaces_momentum and not self.optimizers:
                raise ValueError(
                    "the compression applies momentum, that of small parameters in the optimizer's step: give "
                    "SparseState the optimizer, or set state.optimizer before the first backward pass"
                )
            if self._grad_scaler is not None and self._grad_scaler.is_enabled() and len(self.optimizers) != 1:
                raise ValueError(
                    f"a grad_scaler tells by one optimizer whether a step was skipped, but there are "
                    f"{len(self.optimizers)}: set state.optimizer before the first backward pass"
                )
            named = [(str(number), p) for number, group in enumerate(self.param_groups) for p in group["params"]]
            facts = common_facts(self.compression, named, *self._stall, self._residual_unit, self.optimizers)
            names = tuple(sorted({*self._names.values(), *self._names_by_position.values()}))
            return {**facts, "named_parameters": names}
        except ValueError as error:
            return ValueError(f"rank {job().rank}: {error}")

    def _check_optimizers(self, exchange: Exchange, of_model: Iterable[torch.Tensor]) -> None:
        """Raise on all ranks if an optimizer of any rank is not one of the model; a collective call."""
        error: ValueError | None = None
        try:
            require_own(self.optimizers, of_model, self._names)
        except ValueError as wrong:
            error = ValueError(f"rank {job().rank}: {wrong}")
        if exchange.anywhere([error is not None])[0]:
            raise error or ValueError(
                f"rank {job().rank}: the optimizer of another rank does not belong to its DDP model; "
                "that rank's error has the details"
            )

    def _require_given_again(self) -> None:
        """ValueError if an unpickled state lacks what it was pickled with; positions depend on the optimizer."""
        now, had = self._holds(), self._must_have
        for name in had:
            if had[name] > now[name]:
                raise ValueError(
                    f"the state was pickled with {name}, which a pickle leaves out: set state.{name} again before the "
                    "first backward pass"
                )
        if had and now["optimizer"] > had["optimizer"]:
            raise ValueError(
                "the state was pickled without an optimizer, which orders the parameters: leave state.optimizer unset"
            )

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler that multiplies the loss; to be given again to an unpickled state."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, given: torch.amp.GradScaler | None) -> None:
        if self._exchange is not None:
            raise ValueError("grad_scaler must be set before the first backward pass: give it to SparseState")
        self._grad_scaler = given

    def _between_steps(self) -> Exchange | None:
        if self._exchange is not None and self._exchange.worker.collecting:
            self._exchange.worker.finish()
        return self._exchange

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Everything remembered on this rank, as copies; every rank has its own. Call it after ``optimizer.step()``.

        Args:
            copy: Copies an array to the host.

        Returns:
            Numbers, strings, lists and tensors only, so that ``torch.load(..., weights_only=True)`` reads it.
        """
        exchange = self._between_steps()
        if exchange is None or self._loaded is not None:
            return dict(self._loaded or {"buckets": []})
        return exchange.state_dict(copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of as many ranks.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration. Before the first step the
                parameters are not known: it is raised then.
        """
        exchange = self._between_steps()
        if exchange is not None and exchange.worker.buckets:
            exchange.load_state_dict(state)
        else:
            self._loaded = state

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state that goes on from those of another number of ranks, as ``Exchange.merge``; a collective call.

        Raises:
            ValueError: A state belongs to another model, bucket size or configuration, or the parameters are not known.
        """
        self._between_steps()
        exchange = self._open()
        if not exchange.worker.buckets:
            known = list(self._names) or [p for group in self.param_groups for p in group["params"]]
            if not known:
                raise ValueError("the parameters are not known yet: give SparseState the optimizer or named_parameters")
            self._add(exchange, [p for p in known if p.requires_grad])
        return exchange.merge(states, leader)

    def statistics(self, *, norms: bool = False) -> dict[str, float]:
        """Numbers of what was exchanged since the last call, for any logger.

        Of this rank, each bucket (``bucket0/density``) and all together (``total/density``); docs/watch.md explains
        each. Counting them costs next to nothing; norms cost two passes over the gradients in one step.

        Args:
            norms: Take norms in the next step. The call after it has them: ``total/gradient_norm``,
                ``total/residual_norm``, ``total/gain`` and those of the buckets.

        Returns:
            Plain numbers; nothing where there was no step, or one rank alone.
        """
        exchange = self._between_steps()
        return {} if exchange is None else exchange.worker.statistics(norms)

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far, parameters that travel dense included."""
        return Traffic() if self._exchange is None else self._exchange.traffic

    def __getstate__(self) -> dict[str, Any]:
        """Configuration, names and what is remembered, without process group, communicator, optimizer and scaler.

        Names are keyed by the positions of the parameters, which are the same in a model that is made alike.
        """
        positions = self._positions()
        names = {positions[p]: name for p, name in self._names.items() if p in positions}
        return {
            "compression": self.compression,
            "epoch": self.epoch,
            "residual_unit": self._residual_unit,
            "stall": self._stall,
            "state": self.state_dict(),
            "names": names | self._names_by_position,
            "had": self._must_have if self._exchange is None and self._must_have else self._holds(),
        }

    def _holds(self) -> dict[str, bool]:
        return {"optimizer": bool(self.optimizers), "grad_scaler": self._grad_scaler is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Goes on from there in the default process group; optimizer and scaler must be set again, as attributes."""
        timeout, abort = state["stall"]
        SparseState.__init__(
            self,
            state["compression"],
            residual_unit=state["residual_unit"],
            stall_timeout=timeout,
            stall_abort=abort,
        )
        self.epoch = state["epoch"]
        self._names_by_position = state["names"]
        self._must_have = state["had"] if state["state"]["buckets"] else {}
        self._loaded = state["state"] if state["state"]["buckets"] else None


def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages one bucket of DDP, sparse; for ``model.register_comm_hook(state, hvs.ddp.sparse_hook)``.

    Args:
        state: Of this model alone.
        bucket: Its gradients. What is not of floating point, or sparse (embeddings), is exchanged as DDP itself does.

    Returns:
        A future of the bucket's buffer, which then holds the mean over the ranks.
    """
    return state._receive(bucket)


def _confirmation(worker: weakref.ref[Worker]) -> Any:
    """A hook for an optimizer that tells a worker that a step was applied."""

    def confirm(optimizer: torch.optim.Optimizer, *_: object) -> None:
        overflow, alive = getattr(optimizer, "found_inf", None), worker()
        # With fused=True a GradScaler calls step() in any case and leaves the decision to torch's kernel.
        if alive is not None and not (overflow is not None and overflow.item()):
            alive.confirm()

    return confirm

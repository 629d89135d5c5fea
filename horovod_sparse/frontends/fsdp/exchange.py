"""Exchange of the gradients of one model between replicas of its shards."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.frontends.arguments import agree_on, require_sparse
from horovod_sparse.frontends.eager import weak_hook
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.fsdp.base import WITHOUT_EXCHANGE, ModelExchange, Options, reduced_twice
from horovod_sparse.frontends.fsdp.model import FSDPUnit, require_held, require_replicas, require_saved_by
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.frontends.reshard import Part, merge_replicas
from horovod_sparse.frontends.shards import require_same_selection, shard_facts, shard_of, with_shard
from horovod_sparse.frontends.unapplied import begin_backward
from horovod_sparse.rules import Momentum
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport


class ReplicaExchange(ModelExchange):
    """Exchange of the gradients of one FSDP2 model with its replicas; made by ``sparse_all_reduce``.

    FSDP2 calls the hooks that are registered with ``register_post_accumulate_grad_hook`` as soon as it has reduced a
    parameter's gradient over the shards. They submit this rank's shard, and the end of ``backward()`` waits for the
    results.
    """

    call = "sparse_all_reduce"
    # Averaging the replicas would divide gradients once more, which HSDP does not.
    means = ("with HSDP, because replicas are averaged here in any case", "shards * replicas")

    def __init__(
        self,
        model: nn.Module,
        group: distributed.ProcessGroup,
        compression: Sparse,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        options: Options,
    ) -> None:
        super().__init__(compression, optimizer)
        self._compared = False  # whether the replicas have compared their parameters
        transport = transport_of(group)
        assert transport is not None
        transport.avoid_nccl()  # over which FSDP gathers and reduces while the exchange runs
        with process.communicating("sparse_all_reduce()", transport):
            agree_on(transport, lambda: self._facts(model, group, options))
        self._shard_transport = self._transport_of_shards()
        me = weakref.proxy(self)
        self._exchange = GradientExchange(
            compression,
            transport,
            self.optimizers,
            1 / transport.size,
            limits(*options.stall),
            grad_scaler=options.grad_scaler,
            undoable=options.undoable,
            residual_unit=options.residual_unit,
            total_norm=lambda norm: me._total_norm(norm),
            without_exchange=WITHOUT_EXCHANGE,
            between_steps=lambda: not me._reduced,
        )
        self._exchange.create_buckets(self._parameters, first_in_forward=[self._member_of_uses()])
        self._serve(model)
        if self._exchange.ranks > 1:
            trainable: Mapping[str, Any] = self._parameters
            for name, p in trainable.items():
                p.register_hook(weak_hook(self._backward_begins))  # of a loss that takes shards, without FSDP
                p.register_post_accumulate_grad_hook(weak_hook(self._submit_reduced, name))

    def _facts(self, model: nn.Module, group: distributed.ProcessGroup, options: Options) -> dict[str, Any]:
        """Return the facts that must be the same on every replica; raise ValueError for an error in them."""
        facts = self._common_facts(model, options)
        require_replicas(self._parameters, group)
        require_same_selection(self._parameters, self.compression.dense_below)
        self._require_one_mesh()
        return {**facts, "shard": shard_facts(self._parameters)}

    @property
    def _clips(self) -> bool:
        momentum = self.compression.momentum
        return momentum is not None and momentum.max_norm is not None

    def _require_one_mesh(self) -> None:
        """Raise ValueError if gradients are clipped by a norm that the ranks of one mesh cannot compute."""
        meshes = {p.device_mesh for p in self._parameters.values()}
        if self._clips and (len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes)):
            raise ValueError(
                f"max_norm={self.compression.momentum.max_norm} needs all parameters on one mesh of one dimension, "
                f"not on {', '.join(map(str, meshes))}: set max_norm=None"
            )

    def _transport_of_shards(self) -> Transport | None:
        """Return a transport of the ranks that hold a complete model together, if gradients are clipped by norm."""
        if not self._clips:
            return None
        return transport_of(next(iter(self._parameters.values())).device_mesh.get_group())

    def _total_norm(self, norm: float) -> float:
        """Return the norm of all shards' gradients, on the worker thread; a collective call of their ranks."""
        assert self._shard_transport is not None
        with process.communicating("clipping", self._shard_transport):
            return math.sqrt(self._shard_transport.allreduce(np.array([norm]) ** 2)[0])

    def _require_units(self, units: Iterable[FSDPUnit]) -> None:
        super()._require_units(units)
        require_held(units, self._parameters)

    def _begin_pass(self) -> None:
        with self._refused_together():
            begin_backward(self._exchange)

    @contextmanager
    def _refused_together(self) -> Iterator[None]:
        """Raise an error of this rank on all ranks of all replicas; others have gradients that do not show it.

        A collective call of these ranks in a backward pass before which no optimizer has applied the last exchange. In
        an ordinary step it does nothing.
        """
        collective, error = self._exchange.worker.step.awaits_optimizer, None
        try:
            yield
        except RuntimeError as raised:
            error = raised
        if collective and self._anywhere(error is not None) and error is None:
            error = RuntimeError(
                f"rank {distributed.get_rank()}: another rank refuses to add to exchanged gradients, or to drop those "
                "that were cleared; its error has the details"
            )
        if error is not None:
            raise error

    def _anywhere(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank of any replica; a collective call."""
        (anywhere,) = self._exchange.anywhere([flag], "backward()")
        for mesh in dict.fromkeys(p.device_mesh for p in self._parameters.values()):
            for group in mesh.get_all_groups():
                count = torch.tensor([anywhere], dtype=torch.int32, device=mesh.device_type)
                distributed.all_reduce(count, group=group)
                anywhere = bool(count)
        return anywhere

    def _submit_reduced(self, name: str, p: DTensor) -> None:
        """Submit this rank's shard of a gradient that FSDP has just reduced; the hook of a parameter."""
        if name in self._reduced:
            raise reduced_twice(f"the gradient of {name}")
        self._reduced.add(name)
        assert p.grad is not None
        shard = shard_of(p.grad)
        if p.device_mesh.device_type == "cuda" and not shard.is_cuda:
            torch.cuda.current_stream().synchronize()  # older torch copies it to pinned memory without waiting
        self._submit(name, shard)

    def _submit(self, key: str, shard: torch.Tensor, hold: bool = False) -> None:
        if key in self._exchange.worker:  # else this rank holds no element of the parameter
            self._exchange.worker.put(key, shard, hold)

    def _take_results(self) -> None:
        with self._exchange.worker.completing():
            self._require_frozen()
            missing = self._submit_missing()
            shares = self._submit_uses(self._parameters.keys() - missing)
            self._exchange.worker.wait_for_results()
        if not self._compared:
            self._compared = True
            self._require_same_start()
        if missing:
            for (name, p), share in zip(self._parameters.items(), shares.tolist(), strict=True):
                if share and name in missing:
                    p.grad = with_shard(p, missing[name])

    def _submit_missing(self) -> dict[str, torch.Tensor]:
        """Submit what this backward pass has not reduced; return the arrays of parameters without a gradient.

        Other replicas may have gradients of these parameters. Their residuals on this rank are kept for later steps.
        """
        missing = {}
        for name, p in self._parameters.items():
            if name in self._reduced:
                continue
            if p.grad is None:
                missing[name] = torch.zeros_like(shard_of(p))
                self._submit(name, missing[name], hold=True)
            else:  # of an earlier backward pass, also if the parameter was frozen since, or zeroed in place
                shard = shard_of(p.grad)
                self._submit(name, shard, hold=not shard.any())
        return missing

    def _require_same_start(self) -> None:
        """Raise ValueError if the replicas begin with different parameters; a collective call in the first step."""
        sums = tuple(
            (name, int(shard_of(p).contiguous().view(torch.uint8).sum(dtype=torch.int64)))
            for name, p in self._parameters.items()
        )
        with process.communicating("the first step", self._exchange.transport):
            agree(self._exchange.transport, {"sum of the bytes of a parameter before the first step": sums})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``merge`` returned, or ``state_dict`` on the same rank of equal replicas and shards.

        Raises:
            ValueError: The state belongs to another rank, model, sharding, bucket size or configuration, or is one of
                ``sparse_reduce_scatter``.
        """
        require_saved_by(self.call, state)
        self._part.require(state)
        self._exchange.load_state_dict(state)

    @property
    def _part(self) -> Part:
        return Part.of(self._exchange.transport, self._parameters)

    def _place(self) -> Mapping[str, Any]:
        return self._part.facts()

    def merge(self, states: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
        """Return the state of this rank that continues those of any numbers of replicas and shards.

        The sum of the residuals of each element over the replicas is unchanged. Replica r takes over the old replicas
        r, r + R, r + 2R and so on, where R is the number of replicas. Only the parts that this rank needs are read:
        files can be passed as ``torch.load(path, weights_only=True, mmap=True)``.

        Args:
            states: What ``state_dict`` returned on all ranks of the training that is continued, in any order.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: A state is missing; or the states belong to another model, bucket size or configuration, are
                those of ``sparse_reduce_scatter``, or cannot be converted to this number of shards.
        """
        by_replica: dict[int, list[Mapping[str, Any]]] = {}
        for state in states:
            if self._part.saved(state):
                return dict(state), []
            require_saved_by(self.call, state)
            by_replica.setdefault(state["replica"], []).append(state)
        own = self.state_dict()

        def momentum_of(number: int) -> Momentum:
            return self._exchange.momentum(self._exchange.groups[own["buckets"][number]["parameters"][0]])

        elementwise = self.compression.memory.elementwise
        return merge_replicas(by_replica, own, elementwise, self._exchange.merge, momentum_of)


def sparse_all_reduce(
    model: nn.Module,
    group: distributed.ProcessGroup,
    compression: Sparse,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    undoable: bool = False,
    residual_unit: str | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> ReplicaExchange:
    """Average the gradients of an FSDP2 model over its replicas with a sparse exchange.

    Shard the model over the ranks of one replica, such as those of a node, with a mesh of one dimension. FSDP then
    averages gradients over the shards, dense. From now on, ``backward()`` also averages each rank's shard over the
    replicas: sparse, with error feedback, during the rest of the backward pass, and with the same bits on every
    replica. The replicas must start with the same parameters.

    A collective call of the ranks of the group, which compares model, configuration and optimizers.

    Args:
        model: The model, after ``fully_shard`` and with its parameters on their device.
        group: The ranks that hold the same shard: ``mesh.get_group("replicate")``.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``.
        optimizer: The optimizer of the model, or a list of several, as for ``SparseState``.
        grad_scaler: The scaler of the loss, as for ``DistributedOptimizer``; needs exactly one optimizer.
        undoable: Whether exchanged gradients may be dropped, as for ``DistributedOptimizer``; needs an optimizer.
        residual_unit: "update" or "gradient", as for ``DistributedOptimizer``; None: by each optimizer's class.
        stall_timeout: Seconds before a stall is reported, as for ``DistributedOptimizer``.
        stall_abort: Seconds before a stall ends all ranks, as for ``DistributedOptimizer``.

    Returns:
        The exchange, with its state and statistics. The model keeps it alive.

    Raises:
        TypeError: The group is not a process group, or the optimizer is not a torch optimizer.
        ValueError: The model is not sharded by FSDP2, or over ranks of the group, as with a mesh of two dimensions;
            ``set_gradient_divide_factor`` was called; an argument is out of range; or the replicas differ.
    """
    require_sparse(compression, "pass fully_shard the mesh of both dimensions instead")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"group must be a process group, not {group!r:.200}: pass mesh.get_group('replicate')")
    if distributed.get_rank(group) < 0:
        raise ValueError(f"rank {distributed.get_rank()} is not in the group: pass mesh.get_group('replicate')")
    options = Options(grad_scaler, undoable, residual_unit, (stall_timeout, stall_abort))
    return ReplicaExchange(model, group, compression, optimizer, options)

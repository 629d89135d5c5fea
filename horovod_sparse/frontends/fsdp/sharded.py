"""Sparse reduce-scatter of the gradients of a fully sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.layout import Layout, Member
from horovod_sparse.engine.scattered import Columns, ScatteredBucket
from horovod_sparse.frontends.arguments import agree_on, require_sparse
from horovod_sparse.frontends.confirmation import require_known
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.fsdp.base import WITHOUT_EXCHANGE, ModelExchange, Options, reduced_twice
from horovod_sparse.frontends.fsdp.model import require_saved_by
from horovod_sparse.frontends.fsdp.nodes import NodeSums, nodes_for
from horovod_sparse.frontends.fsdp.regions import layout_of, merged_states
from horovod_sparse.frontends.fsdp.scattering import (
    Unit,
    UnitParameter,
    require_scattered,
    require_selection,
    scattered_units,
)
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.frontends.momentum import hooks_of
from horovod_sparse.frontends.optimizers import group_numbers, optimizer_of
from horovod_sparse.frontends.scaling import by_bucket, factor_of
from horovod_sparse.frontends.shards import shard_of

_NONE = -1  # in place of the number of an optimizer: parameters that are in none


class ScatteredExchange(GradientExchange):
    """Exchange whose buckets are scattered, unless they are small."""

    _scattered: Sequence[Unit]  # whose buckets ``add`` creates

    def scatter(self, units: Sequence[Unit], first_in_forward: Member) -> None:
        """Create the buckets of units and of another gradient; a collective call."""
        self._scattered = units
        members = [member._replace(size=member.size * self.ranks) for unit in units for member in unit.members]
        self.add([first_in_forward, *members])
        parameters = {name: one for unit in units for name, one in unit.parameters.items()}
        self.names |= {one.p: one.bucket_key for one in parameters.values()}
        self.delivered_of = {one.p: self.delivered[name] for name, one in parameters.items() if name in self.delivered}

    def _bucket(self, layout: Layout) -> Bucket:
        if layout.small:
            return super()._bucket(layout)
        shards = [shard for unit in self._scattered for shard in unit.shards(layout.keys[0])]
        return ScatteredBucket(layout, shards, self._settings, self.transport, self._shared)

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which holds momentum of this rank's shards."""
        return tensor

    def put(self, key: str, rows: torch.Tensor, columns: Sequence[Columns]) -> torch.Tensor:
        """Exchange the rows of a scattered bucket; return the tensor that receives this rank's result."""
        (bucket,) = (bucket for bucket in self.worker.buckets if key in bucket.layout.keys)
        assert isinstance(bucket, ScatteredBucket)
        result = bucket.begin_step(columns)
        self.worker.put(key, rows)
        return result


class ShardedExchange(ModelExchange):
    """Sparse reduce-scatter of the gradients of one FSDP2 model; made by ``sparse_reduce_scatter``.

    FSDP calls each unit's reduce-scatter as soon as the backward pass has left the unit, and then the hooks of the
    parameters whose gradients it holds. The unit returns zeros, and submits what it got when the last hook was called.
    Results are added to the gradients as they arrive, so that they need no memory together; the end of ``backward()``
    waits for the last ones.
    """

    call = "sparse_reduce_scatter"
    means = ("with FSDP's own reduce-scatter, because gradients are averaged here in any case", "ranks")

    _exchange: ScatteredExchange

    def __init__(
        self,
        model: nn.Module,
        compression: Sparse,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        options: Options,
    ) -> None:
        super().__init__(compression, optimizer)
        self._model = weakref.ref(model)
        self._units: list[Unit] = []
        self._used: set[str] = set()  # parameters that have a gradient in the backward pass in progress
        self._results: dict[str, list[tuple[UnitParameter, torch.Tensor]]] = {}  # to be added to gradients, by bucket
        self._accumulates = False  # whether the pass in progress adds to gradients that hold results of the one before
        # Of the last exchange:
        self._began_cleared = False  # whether no parameter had a gradient before, so that these hold its results only
        self._received: list[UnitParameter] = []  # whose gradients results were added to, if this rank holds elements
        self._nonzero: set[int] = set()  # numbers of the optimizers of these, if a gradient was not all zeros then
        group = require_scattered(model, self.call).get_group()
        transport = transport_of(group)
        assert transport is not None
        transport.avoid_nccl()  # over which FSDP gathers and reduces while the exchange runs
        with process.communicating(f"{self.call}()", transport):
            agree_on(transport, lambda: self._facts(model, options))
            nodes = nodes_for(compression, transport)
            world = distributed.get_process_group_ranks(group)
            sums = None if nodes is None else NodeSums(nodes, transport, world)
        self._shard, self._shards = transport.rank, transport.size
        self._owners = list(range(transport.size)) if sums is None else sums.owners
        me = weakref.proxy(self)
        self._exchange = ScatteredExchange(
            compression,
            transport if nodes is None else nodes.peers,
            self.optimizers,
            1 / transport.size,
            limits(*options.stall),
            grad_scaler=options.grad_scaler,
            undoable=options.undoable,
            residual_unit=options.residual_unit,
            instead_of_clipping="let the compression bound what a step delivers: memory='momentum' with limit, as "
            "recommended does",
            without_exchange=WITHOUT_EXCHANGE,
            between_steps=lambda: not me._reduced,
        )
        if transport.size > 1:
            self._exchange.scatter(self._units, self._member_of_uses())
            for unit in self._units:
                unit.attach(self, sums)
        self._serve(model)

    def _facts(self, model: nn.Module, options: Options) -> dict[str, Any]:
        """Return the facts that must be the same on every rank; raise ValueError for an error in them."""
        require_selection(self.compression, self.call)
        facts = self._common_facts(model, options)
        groups = group_numbers(self.optimizers)
        self._units = scattered_units(model, self._parameters, groups, self.compression.dense_below)
        return {**facts, "unit": tuple(unit.facts for unit in self._units)}

    def begin_unit(self, unit: Unit) -> None:
        """Prepare for a unit's gradients, before FSDP changes any gradient of a parameter."""
        self._backward_begins()  # if the forward pass was before the call of sparse_reduce_scatter
        if unit in self._reduced:
            raise reduced_twice(f"the gradients of {unit.name}")
        if not self._reduced:
            model = self._model()
            assert model is not None
            self._require_unchanged(model)
            self._settle_last()
            self._began_cleared = all(p.grad is None for p in self._parameters.values())
            self._received.clear()
            self._nonzero.clear()
        self._reduced.add(unit)
        # In FSDP's stream of reduce-scatters, in which it has set the gradients of the units before.
        for bucket in self._exchange.worker.wait_for_all_but_last():
            self._add_results(bucket.layout.keys)

    def _settle_last(self) -> None:
        """Decide about results of the last exchange that no optimizer has applied, for each optimizer.

        If its gradients still hold them, this pass adds to them, and they count as applied. If they were cleared, the
        exchange is undone or, if that is not possible, an error is raised. Unlike with ``begin_backward``, a rank may
        hold no element of an optimizer's parameters: before any optimizer has taken a step, all ranks decide together.
        """
        worker, momentum = self._exchange.worker, self.compression.replaces_momentum
        for optimizer, hooks in hooks_of(self._exchange).items():
            hooks.note_changes(optimizer)
            if hooks.may_hold_momentum:
                hooks.note_backward(optimizer)
        self._accumulates = False
        numbers, together = worker.unapplied_numbers(), worker.step.awaits_optimizer
        if not numbers and not together:
            return
        require_known(self._exchange)
        unapplied = {self._optimizer_of(bucket.layout.group) for bucket in worker.step.unapplied}
        known = [*range(len(self.optimizers)), _NONE] if together else sorted(unapplied)
        kept = self._kept(known, self._scaled(numbers), together) & unapplied
        if kept - {_NONE} and (self._exchange.undoable or momentum):
            reason = "momentum would decay twice" if momentum else "a step that is then skipped could not be undone"
            raise RuntimeError(
                f"rank {distributed.get_rank()}: gradients are added to exchanged ones before a step of the optimizer, "
                f"and {reason}: call model.set_requires_gradient_sync(False) for all backward passes of a step but the "
                "last"
            )
        self._accumulates = bool(kept)
        worker.confirm(lambda group: self._optimizer_of(group) in kept)
        worker.drop_unapplied()

    def _optimizer_of(self, group: int) -> int:
        """Return the number of the optimizer of a param group; all parameters are one's if none was given."""
        return optimizer_of(group, len(self.optimizers))[0] if self.optimizers and group >= 0 else _NONE

    def _kept(self, optimizers: Sequence[int], scaled: bool, together: bool) -> set[int]:
        """Return the optimizers whose gradients hold results of the last exchange.

        Args:
            optimizers: Numbers of optimizers.
            scaled: Whether gradients of this rank were multiplied since the exchange.
            together: Whether all ranks call this in a backward pass, for the same optimizers, and decide together.

        Raises:
            RuntimeError: Gradients were changed, or only some of an optimizer's were cleared.
        """
        mesh = next(iter(self._parameters.values())).device_mesh
        own = [self._traces(number) for number in optimizers]
        flags = torch.tensor([*own, (scaled,) * 3], dtype=torch.int32, device=mesh.device_type)
        if together:
            distributed.all_reduce(flags, group=mesh.get_group())
        *anywhere, (changed, *_) = flags.tolist()
        if changed or any(holding and cleared for holding, cleared, _ in anywhere):
            raise RuntimeError(
                f"rank {distributed.get_rank()}: some gradients were cleared or changed after their exchange, here or "
                "on another rank, and a backward pass would add to the others before a step of the optimizer: clear "
                "all of them, or change them only after the last backward pass before the step"
            )
        found = zip(optimizers, anywhere, strict=True)
        return {number for number, (holding, cleared, present) in found if holding or (present and not cleared)}

    def _traces(self, optimizer: int) -> tuple[bool, bool, bool]:
        """Return what this rank's gradients show of an optimizer's results of the last exchange.

        Whether some gradients hold results, whether some were cleared, and whether there are any: if all results were
        zeros, or this rank holds no element, they do not show whether they were cleared.
        """
        groups = self._exchange.groups
        own = [one.p for one in self._received if self._optimizer_of(groups[one.bucket_key]) == optimizer]
        gradients = [shard_of(p.grad) for p in own if p.grad is not None]
        holding = any(bool(gradient.any()) for gradient in gradients)
        zeroed = bool(gradients) and not holding and optimizer in self._nonzero
        return holding, zeroed or len(gradients) < len(own), bool(gradients)

    def _scaled(self, numbers: Iterable[int]) -> bool:
        """Return whether gradients of buckets that hold their last results were multiplied since the exchange."""
        if not self._began_cleared:
            return False  # not known
        buckets = by_bucket(self._exchange.delivered_of)
        factors = (factor_of(buckets[number], self._exchange.factor) for number in numbers if number in buckets)
        return any(factor is not None and abs(factor - 1) > 1e-2 for factor in factors)

    def submit_unit(self, unit: Unit, rows: torch.Tensor, sources: Mapping[str, int]) -> None:
        """Exchange the gradients of a unit.

        Args:
            unit: The unit.
            rows: The shards of its gradients, one row for each rank that takes part in the exchange.
            sources: First columns of the parameters that have a gradient.
        """
        self._used.update(sources)
        columns: dict[str, list[Columns]] = {}
        for name, source in sources.items():
            parameter = unit.parameters[name]
            if parameter.small:
                if rows.is_cuda:  # FSDP frees them after an event that it has recorded before the copy
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                own = rows[:, source : source + parameter.width]
                self._submit_small(parameter, own.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
            else:
                taken = Columns(source, parameter.place, parameter.width)
                columns.setdefault(parameter.bucket_key, []).append(taken)
        for key, of_bucket in columns.items():
            self._submit_bucket(unit, key, rows, of_bucket)

    def _submit_small(self, parameter: UnitParameter, rows: torch.Tensor, hold: bool = False) -> None:
        """Exchange a parameter that is sent dense."""
        self._exchange.worker.put(parameter.bucket_key, rows, hold)
        self._results[parameter.bucket_key] = [(parameter, rows[self._exchange.transport.rank])]

    def _submit_bucket(self, unit: Unit, key: str, rows: torch.Tensor, columns: Sequence[Columns]) -> None:
        """Exchange a bucket with a selection.

        Parameters without a gradient here get results, too: other ranks may have one, and with momentum, results also
        subtract what the optimizer's momentum repeats of earlier ones.
        """
        result = self._exchange.put(key, rows, columns)
        own = [parameter for parameter in unit.parameters.values() if parameter.bucket_key == key]
        self._results[key] = [(one, result[one.place : one.place + one.width]) for one in own]

    def _take_results(self) -> None:
        try:
            with self._exchange.worker.completing():
                for unit in self._reduced:
                    unit.require_complete()
                self._submit_missing()
                shares = self._submit_uses(self._used)
                self._exchange.worker.wait_for_results()
            for p, share in zip(self._parameters.values(), shares.tolist(), strict=True):
                if share and p.grad is None:  # another rank has a gradient
                    p.grad = torch.zeros_like(p)
            self._add_results(list(self._results))
            if self._accumulates:  # no gradient is what was delivered last
                for bucket in self._exchange.worker.buckets:
                    bucket.pipeline.sample = None
        finally:
            self._results.clear()
            self._used.clear()

    def _add_results(self, keys: Iterable[str]) -> None:
        """Add results to the gradients that there are, and free them."""
        for key in keys:
            waiting = []  # another rank may have a gradient, which the end of the pass shows
            for parameter, result in self._results.pop(key, ()):
                if parameter.p.grad is None:
                    waiting.append((parameter, result))
                    continue
                shard, optimizer = shard_of(parameter.p.grad), self._optimizer_of(self._exchange.groups[key])
                shard.add_(result.flatten()[: shard.numel()].view(shard.shape))
                if shard.numel():
                    self._received.append(parameter)
                if optimizer not in self._nonzero and shard.any():
                    self._nonzero.add(optimizer)
            if waiting:
                self._results[key] = waiting

    def _submit_missing(self) -> None:
        """Submit what this backward pass has not reduced here; its residuals on this rank are kept for later steps."""
        missing = set(self._exchange.worker.missing)
        for unit in self._units:
            for member in (member for member in unit.members if member.key in missing):
                if member.small:
                    zeros = torch.zeros(self._exchange.ranks, member.size, dtype=member.dtype, device=member.device)
                    self._submit_small(unit.parameters[member.key], zeros, hold=True)
                else:
                    self._submit_bucket(unit, member.key, torch.empty(0, device=member.device), [])

    def _place(self) -> Mapping[str, Any]:
        layout = layout_of(self._units)
        return {"shard": self._shard, "shards": self._shards, "owners": self._owners, "layout": layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``merge`` returned, or ``state_dict`` on the same rank of the same number of ranks.

        Raises:
            ValueError: The state belongs to another rank, number of ranks, model or configuration, or is one of
                ``sparse_all_reduce``.
        """
        require_saved_by(self.call, state)
        if not self._is_own(state):
            raise ValueError(
                f"rank {distributed.get_rank()}: the state is that of shard {state.get('shard')} of "
                f"{state.get('shards')}, or of another model: pass the states of all ranks to merge, and load what it "
                "returns"
            )
        self._exchange.load_state_dict(state)

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        return all(state.get(name) == fact for name, fact in self._place().items())

    def merge(self, states: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
        """Return the state of this rank that continues those of any number of ranks.

        The sum of the residuals of each element over the ranks is unchanged. Rank r takes over the old ranks r, r + P,
        r + 2P and so on, where P is the number of ranks, or of nodes whose ranks share residuals.

        Args:
            states: What ``state_dict`` returned on all ranks of the training that is continued, in any order.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: A state is missing; or the states belong to another model or configuration, are those of
                ``sparse_all_reduce``, or cannot be converted to this number of ranks.
        """
        by_rank: dict[int, Mapping[str, Any]] = {}
        for state in states:
            if self._is_own(state):
                return dict(state), []
            require_saved_by(self.call, state)
            by_rank[state["shard"]] = state
        own = self.state_dict()
        counts = {state["shards"] for state in by_rank.values()}
        if len(counts) != 1:
            raise ValueError(f"the states were saved by {sorted(counts)} ranks: pass those of one save")
        missing = sorted(set(range(max(counts))) - by_rank.keys())
        if missing:
            raise ValueError(f"the states of ranks {missing} are missing: pass those of all ranks")
        if own["buckets"] and by_rank[0]["buckets"] and not self.compression.memory.elementwise:
            raise ValueError(
                f"memory {self.compression.facts()['memory']['of']!r} compresses its error, which cannot be converted "
                f"from {max(counts)} to {own['shards']} ranks: load it with the number of ranks it was saved with"
            )
        sizes = {name: p.numel() for name, p in self._parameters.items()}
        merged, notes = self._exchange.merge(*merged_states([by_rank[old] for old in sorted(by_rank)], own, sizes))
        return {**own, **merged}, notes


def sparse_reduce_scatter(
    model: nn.Module,
    compression: Sparse,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    undoable: bool = False,
    residual_unit: str | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> ShardedExchange:
    """Average the gradients of a fully sharded FSDP2 model with a sparse reduce-scatter.

    From now on, ``backward()`` sums the gradients of each FSDP unit sparse, with error feedback, instead of dense.
    Parameters are gathered as before.

    A collective call of the ranks that shard the model, which compares model, configuration and optimizers.

    Args:
        model: The model, after ``fully_shard`` over a mesh of one dimension and with its parameters on their device.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``. Of its collective, only ``wire``,
            ``indices`` and ``node_ranks`` count: if it distinguishes nodes, as ``auto`` does, the ranks of a node sum
            their gradients dense first, where several nodes have the same number of ranks, more than one, and all
            ranks of the job shard the model.
        optimizer: The optimizer of the model, or a list of several, as for ``SparseState``.
        grad_scaler: The scaler of the loss, as for ``DistributedOptimizer``; needs exactly one optimizer.
        undoable: Whether exchanged gradients may be dropped, as for ``DistributedOptimizer``; needs an optimizer.
        residual_unit: "update" or "gradient", as for ``DistributedOptimizer``; None: by each optimizer's class.
        stall_timeout: Seconds before a stall is reported, as for ``DistributedOptimizer``.
        stall_abort: Seconds before a stall ends all ranks, as for ``DistributedOptimizer``.

    Returns:
        The exchange, with its state and statistics. The model keeps it alive.

    Raises:
        TypeError: The optimizer is not a torch optimizer.
        ValueError: The model is not sharded by FSDP2 over one mesh of one dimension; it reduces gradients in float16 or
            float64; the compression clips gradients by ``max_norm``, or its sparsifier needs the total of all ranks; an
            argument is out of range; or the ranks differ.
    """
    require_sparse(compression, "use fully_shard alone")
    options = Options(grad_scaler, undoable, residual_unit, (stall_timeout, stall_abort))
    return ShardedExchange(model, compression, optimizer, options)

"""The four rules of one bucket, up to the exchange of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse import metrics
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.engine.pipeline.units import Scales
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Accumulator, BucketContext, Mode, Reduced, SparseVector, Step
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")


class Plan(NamedTuple):
    """Decision about one step.

    Attributes:
        elements: Number of elements that take part, averaged over the ranks.
        densities: Densities of the candidates, descending.
        ks: Number of entries of each candidate.
        mode: What is sent.
        wire: Format to which everything is rounded; None: not rounded, or not sent.
    """

    elements: int
    densities: Sequence[float]
    ks: list[int]
    mode: Mode
    wire: str | None


@dataclass(slots=True)
class Selection:
    """Entries that a step sends, and the memory that they were taken from.

    As a context, in which it is exchanged: after an error, the memory keeps everything, as nothing was delivered.

    Attributes:
        step: The step.
        plan: The decision.
        memory: The memory, which is open.
        accumulator: What remains there.
        vector: The entries to send.
        density: Share of the entries.
        k: Number of entries that each rank selects.
        norms: Norms of the step, if they are measured.
        was_empty: Whether the memory held nothing before the step.
    """

    step: Step
    plan: Plan
    memory: Any
    accumulator: Accumulator
    vector: SparseVector
    density: float
    k: int
    norms: Norms | None
    was_empty: bool

    def __enter__(self) -> None:
        """Begin the exchange."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Take everything back after an error."""
        if error is not None:
            self.take_back()

    def close(self, returned: SparseVector) -> None:
        """Close the memory, which keeps what the exchange has returned."""
        self.memory.close(self.accumulator, self.vector, returned)

    def take_back(self) -> None:
        """Close the memory, which keeps everything."""
        self.close(self.vector)


class Rules:
    """Memory, sparsifier, collective and schedule of one bucket.

    Args:
        sparse: The configuration.
        context: The bucket and the rank.
        transport: The ranks that take part.
    """

    def __init__(self, sparse: Sparse, context: BucketContext, transport: Transport) -> None:
        self._sparse, self._context, self._transport = sparse, context, transport
        self._wire = sparse.wire_of_all
        self._algorithm = str(sparse.facts()["collective"]["of"])
        self.memory, self.sparsifier, self.collective, self.schedule = sparse.build(context, transport)
        owns = hasattr(self.collective, "allreduce_owned") and not self.sparsifier.shares_indices
        self._owning: Any = self.collective if owns else None
        self._rounded: dict[str | None, Any] = {}  # dense collectives by format
        self._pausing = sparse.without_memory(context)  # used while the memory pauses
        self._density = 0.0  # of the last step

    @property
    def remember_nothing(self) -> bool:
        """True if the memory is known to hold zeros only."""
        return self._sparse.memory.keeps_nothing or getattr(self.memory, "empty", False)

    def plan(self, step: Step, elements: int) -> Plan:
        """Decide k, the mode and the algorithm, before anything is selected."""
        densities = self.schedule.densities(step)
        # Everything that an owner of a shard holds of it stays there: the others send a share of what is left.
        owns = self._context.scatters and self._owning is not None
        selectable = elements - elements // self._context.ranks if owns else elements
        ks = [self._sparse.k(selectable, density) for density in densities]
        if not ((elements and selectable <= ks[0]) or self.collective.decide(self._context.size, ks[0])):
            return Plan(elements, densities, ks, Mode.SELECT, self._wire)
        wire = (self.schedule.wire_of_all if densities[0] == 1 else None) or self._wire
        wire = None if step.number < self._sparse.dense_steps else wire
        return Plan(elements, densities, ks, Mode.of_all(wire), wire)

    def select(self, step: Step, plan: Plan, scales: Scales, measures: bool) -> Selection:
        """Open the memory, and take out of it what is sent.

        Args:
            step: The step.
            plan: The decision.
            scales: Factors of the step.
            measures: Whether norms are measured.
        """
        norms, was_empty = Norms(step) if measures else None, self.remember_nothing
        memory = self._pausing if scales.paused else self.memory
        accumulator = memory.open(step, scales.memory)
        vector, density, k = self._take(accumulator, plan, step)
        if metrics.recording:
            metrics.mark("density", bucket=self._context.bucket, step=step.number, density=density)
        if density != self._density and self._context.rank == 0:
            _LOG.info("bucket %d, step %d: density %.3g", self._context.bucket, step.number, density)
        self._density = density
        return Selection(step, plan, memory, accumulator, vector, density, k, norms, was_empty)

    def _take(self, accumulator: Accumulator, plan: Plan, step: Step) -> tuple[SparseVector, float, int]:
        """Take entries out of the accumulator; return them with their density and k."""
        if plan.mode is not Mode.SELECT:
            return accumulator.take_all(), 1.0, plan.ks[0]
        region = None if self._owning is None else self._owning.region(self._context.size)
        others = accumulator if region is None else accumulator.outside(*region)
        vector = self.sparsifier.take(others, plan.ks[0], step)
        if len(plan.ks) == 1:
            return vector, plan.densities[0], plan.ks[0]
        levels = [vector]
        for k in plan.ks[1:]:
            levels.append(self.sparsifier.narrow(levels[-1], k, step))  # saves a selection from the bucket
        square_norm = kernels_for(self._context.like).square_norm
        squares = [square_norm([(0, level.values)]) for level in levels]
        chosen, gains = self.schedule.choose(squares, lambda: square_norm(accumulator.active()))
        metrics.mark("weigh", bucket=self._context.bucket, step=step.number, gains=gains, chosen=chosen)
        if chosen is None:
            accumulator.put_back(vector)
            return accumulator.take_all(), 1.0, plan.ks[0]
        accumulator.put_back(vector.without(levels[chosen]))
        return levels[chosen], plan.densities[chosen], plan.ks[chosen]

    def exchange(self, selection: Selection, safe: bool = True) -> Reduced:
        """Sum the selections of the ranks; one that is not safe to sum takes part with zeros."""
        accumulator, k = selection.accumulator, selection.k
        vector = selection.vector = self.collective.extend(accumulator, selection.vector, k)
        sent = vector if safe else replace(vector, values=np.zeros_like(vector.values))
        own = accumulator.inside(zero=not safe)
        if own is None or vector.indices is None:
            reduced: Reduced = self._collective(selection.plan.wire).allreduce(sent, k)
        else:
            reduced = self._owning.allreduce_owned(sent, k, own)
        return reduced

    def _collective(self, wire: str | None) -> Any:
        """Return the configured collective, or a dense one that rounds to another format or not at all."""
        if wire == self._wire:
            return self.collective
        if wire not in self._rounded:
            self._rounded[wire] = self._sparse.rounded(wire, self._context, self._transport)
        return self._rounded[wire]

    def algorithm(self, selection: Selection) -> str:
        """Return the name of the algorithm that sums a selection, for statistics."""
        if selection.vector.indices is not None:
            return str(getattr(self.collective, "choice", self._algorithm))
        return "_".join(["dense", selection.plan.wire] if selection.plan.wire else ["dense"])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the four rules by their kinds, not copied."""
        kinds = ("memory", "sparsifier", "collective", "schedule")
        return {kind: getattr(self, kind).state_dict() for kind in kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states from ``state_dict``; other keys are ignored."""
        for rule in ("memory", "sparsifier", "collective", "schedule"):
            getattr(self, rule).load_state_dict(state[rule])

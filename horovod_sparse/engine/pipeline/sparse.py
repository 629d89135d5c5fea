"""Sparse pipeline of one bucket; the only module that calls all four rules."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse import metrics
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline.base import NoBackwardError, PipelineBase
from horovod_sparse.engine.pipeline.handover import Handover
from horovod_sparse.engine.pipeline.headroom import Headroom
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.rules import (
    Accumulator,
    BucketContext,
    Conditions,
    Exchange,
    Momentum,
    SparseVector,
    Step,
    snapshot,
)
from horovod_sparse.rules.states import checked_flag, checked_integer, checked_number, require_finite, require_like
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic
from horovod_sparse.transport.waiting import keep_alive

_LOG = logging.getLogger("horovod_sparse")
_SAMPLE = 64  # entries
_MEAN_OVER = 10  # steps, about, that the mean of norms covers
_FILLING = 20  # steps in which velocities grow, at a momentum of 0.9; they have no limit
_REPLACED = 1 << 32  # added to the first number of the agreement, whose lower bits count ranks


class _Facts(NamedTuple):
    """Sums over the ranks that a step depends on.

    Attributes:
        working: Number of ranks with a backward pass.
        elements: Number of elements that take part, over all ranks.
        epochs: Sum of 1 + epoch over the working ranks that know it.
        resuming: Number of ranks whose gradients were added to the result of the exchange before.
    """

    working: int = 0
    elements: int = 0
    epochs: int = 0
    resuming: int = 0

    @property
    def epoch(self) -> int | None:
        """The epoch of the working ranks; None: not known."""
        return self.epochs // self.working - 1 if self.epochs and self.working else None


class _Plan(NamedTuple):
    """Decision about one step.

    Attributes:
        elements: Number of elements that take part, averaged over the ranks.
        densities: Densities of the candidates, descending.
        ks: Number of entries of each candidate.
        dense: Whether everything is sent instead.
        wire: Format to which values are then rounded; None: not rounded.
        plain: Whether the step is dense and not 1-bit.
    """

    elements: int
    densities: Sequence[float]
    ks: list[int]
    dense: bool
    wire: str | None

    @property
    def plain(self) -> bool:
        return self.dense and self.wire != "sign"


class _Units(NamedTuple):
    """Factors that convert the memory's content to an update and to a mean gradient.

    Attributes:
        update: 0: the content is worth no update, as it is of steps with a learning rate of 0.
        gradient: 0: not known yet, as nothing has been in the memory.
        mean: Whether ``update`` is a mean over the gradients in the memory, as momentum is applied to what it delivers.
    """

    update: float = 0.0
    gradient: float = 0.0
    mean: bool = False


class _Scales(NamedTuple):
    """Units of a step, and the factors on gradients of earlier steps and on the memory.

    Attributes:
        units: Units of this step's gradients.
        carry: Factor on gradients of earlier steps.
        memory: Factor on the memory.
        earlier: What converts the memory's content, times that factor, to an update.
        paused: Whether the memory takes no part, as the step is worth nothing compared to its content.
    """

    units: _Units
    carry: float = 1.0
    memory: float = 1.0
    earlier: float = 0.0
    paused: bool = False

    @property
    def kept(self) -> float:
        """Factor on what the optimizer's buffer holds, in this step and later ones."""
        return 1.0 if self.paused else self.carry

    @property
    def once(self) -> float:
        """Factor on what the optimizer's buffer holds, in this step only, as its unit stays that of the memory."""
        return self.carry if self.paused else 1.0

    def after(self, density: float) -> _Units:
        """Return the units of the memory after a step that has delivered a share of its content."""
        if not self.units.mean:
            return self.units
        return self.units._replace(update=self.earlier + density * (self.units.update - self.earlier))


class SparsePipeline(PipelineBase):
    """Memory, sparsifier, collective and schedule of one bucket.

    Invariant: total + sum over ranks of the new memory = sum over ranks of (scale * old memory + gradients), where
    scale = old unit / new unit. The unit is learning rate / loss scale * factor: the memory's content times the unit is
    an update, even if the state is loaded with another world size. In a step with a learning rate of 0, or so small
    that rounding the memory's content changes more, the memory pauses: it keeps its content and unit, and what is left
    of the gradients is dropped. For a scale-free optimizer, the unit is 1 / loss scale * factor. Both units are
    remembered, so that a state can be continued with either.

    If the optimizer applies momentum to what is delivered, later learning rates multiply it, too. The scale is then at
    most 1, apart from the loss scale, and the old unit is the mean of the learning rates at which the memory's content
    was computed: each step replaces a share of it, its density. No gradient then has more effect than one of the
    present step, nor than the mean rate of its time warrants.

    If the memory applies the optimizer's momentum, total is a velocity, and the optimizer gets the gradient with which
    its own momentum arrives at it: see ``Handover``.

    Args:
        sparse: The configuration.
        context: The bucket and the rank.
        transport: The ranks that take part.
        agreement: Channel for the facts that the ranks agree on in every step.
        consensus: Channel of ``context.consensus``.
        factor: Factor on the totals; 1/P averages.

    Attributes:
        handover: What the optimizer's own momentum holds of what was delivered.
        replaced: Whether any rank's momentum was replaced before the last step.
        sent: Some entries of the sum that the last step has delivered; None after a dense step.
        changed: Whether the last exchange has changed the memory.
        steps: Number of steps so far, without those that were sent dense for a gradient that was not finite.
    """

    def __init__(
        self,
        sparse: Sparse,
        context: BucketContext,
        transport: Transport,
        agreement: Transport,
        consensus: Transport,
        factor: float,
    ) -> None:
        super().__init__(context, transport, factor)
        self._agreement, self._consensus = agreement, consensus
        self._sparse = sparse
        self._units = _Units()
        self.steps = 0
        self._density = 0.0  # of the last step
        self._before: dict[str, Any] = {}  # state before the last step, if it may be undone
        self._kept = False  # whether that step has begun
        self._facts = _Facts()
        self._stable = False  # whether the facts have not changed since the step before, and may be relied upon
        self._algorithm = str(sparse.facts()["collective"]["of"])
        self.memory, self.sparsifier, self.collective, self.schedule = sparse.build(context, transport)
        owns = hasattr(self.collective, "allreduce_owned") and not self.sparsifier.shares_indices
        self._owning: Any = self.collective if owns else None
        self._rounded: dict[str | None, Any] = {}  # by format
        self._headroom = Headroom(context, self.memory)
        self._pausing = sparse.without_memory(context)  # used while the memory pauses
        self.handover = Handover(context)
        self.sent: SparseVector | None = None
        self.replaced = False
        self._replaced_here = False  # on this rank, since the last step of the optimizer
        self._loaded = False  # a state, since the last step
        self.changed = False
        self._norm = 0.0  # mean of the norms of what the last steps have delivered, if there is a limit
        self._dense = False  # whether the last step sent everything

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received for this bucket, in exchanges and sums of its rules."""
        total = Traffic()
        for part in (self.collective.traffic, self._consensus.traffic):
            total.add(part)
        return total

    @property
    def rounds(self) -> int:
        """Rounds of messages so far, including those of agreements."""
        return self.traffic.rounds + self._agreement.traffic.rounds

    def _run(self, gradients: Segments, outputs: Segments, conditions: Conditions, resumes: bool) -> None:
        """Exchange the gradients of one step.

        Whether the gradients of all ranks are finite is known after a message from each. If nothing else has changed in
        the last steps, these messages are sent together with the exchange, whose result is used if all are finite.
        """
        self._enter("select")
        if not resumes:
            self.changed = False
            if self._context.undoable:
                self._keep()
        scales = self._scales(conditions)
        elements = sum([array.size for _, array in gradients])
        # A step that may be undone detects values that are not finite in the selected entries, without another pass.
        late = self._context.undoable and not resumes
        safe = late or self._can_add(gradients, elements, max(scales.carry, scales.memory))
        # A rank in `hvd.join()` does not know the epoch and gets it from working ranks. 0 stands for none.
        epoch = 0 if conditions.idle or conditions.epoch is None else conditions.epoch + 1
        # Each rank may have loaded momentum of its own before this bucket was created.
        self._replaced_here |= conditions.momentum.begun and not (self.steps or self._loaded)
        first = (not safe) + _REPLACED * self._replaced_here
        mine = np.array([first, not conditions.idle, elements, epoch, resumes], np.int64)
        relies = self._stable and not resumes
        if not relies:
            self._enter("agree")
            if self._learn(self._agreement.allreduce(mine)):
                self._send_dense(gradients, outputs, None if resumes else conditions.momentum, scales.carry)
                return
            self._enter("select")
        if resumes:
            gradients = self._added(conditions, gradients)
        self._send_sparse(gradients, outputs, conditions, scales, mine, relies, resumes and not self._dense)

    def _learn(self, sums: Array) -> bool:
        """Learn the facts from their sums; return True, with nothing changed, if a rank's gradients are not safe."""
        first, *numbers = sums.tolist()
        unsafe, self.replaced = first % _REPLACED, first >= _REPLACED
        if self.replaced:
            self.handover.forget()
            if not self._replaced_here:
                self.velocity[...] = 0
        facts = _Facts(*numbers)
        if not facts.working:
            raise self._no_backward()
        if facts.resuming not in (0, self._context.ranks):
            raise RuntimeError(
                f"rank {self._context.rank}: {facts.resuming} of {self._context.ranks} ranks have added gradients to "
                "exchanged ones that no step has applied, and the others have not: do the same on all ranks"
            )
        if not unsafe:
            # Without a memory, the selection of a discarded exchange would be lost.
            relies = self.schedule.predictable and not self._sparse.memory.keeps_nothing
            self._stable = relies and facts == self._facts and facts.elements > 0 and not facts.resuming
            self._facts = facts
        return bool(unsafe)

    def _added(self, conditions: Conditions, gradients: Segments) -> Segments:
        """Return what was added to the result of the last exchange, which the optimizer has not applied.

        The ranks hold that result as gradients, equal parts of it, and exchange it once more. If the optimizer's
        momentum is applied before the selection, it is an effective gradient; the memory then takes back the
        velocities themselves.
        """
        added = np.zeros(self._context.size, self._context.like.dtype, like=self._context.like)
        self._kernels.accumulate(gradients, added)
        self.steps -= 1
        momentum = self._momentum(conditions, self.steps)
        if self._sparse.takes_momentum_over and (momentum.factor or momentum.averages):
            unapplied = self.handover.unapplied(momentum).times(-self.factor)
            self._kernels.add(unapplied.indices, unapplied.values, added)
            memory: Any = self.memory
            memory.take_back(self.handover.next.times(1 / self._context.ranks))
            self._headroom.forget()
        return [(start, added[start : start + array.size]) for start, array in gradients]

    @property
    def _remembers_nothing(self) -> bool:
        """True if the memory is known to hold zeros only."""
        return self._sparse.memory.keeps_nothing or getattr(self.memory, "empty", False)

    @staticmethod
    def _momentum(conditions: Conditions, number: int) -> Momentum:
        return conditions.momentum if number else replace(conditions.momentum, share=conditions.momentum.first)

    def _keep(self) -> None:
        """Keep the state before a step; copy what the step changes in place."""
        state = self.state_dict()
        left = {"memory": state.pop("memory")} if getattr(self.memory, "alternates", False) else {}
        self._before = {**snapshot(state, self._before), **left}
        self._kept = True

    def _can_add(self, gradients: Segments, elements: int, factor: float) -> bool:
        """Return whether the gradients, and their sums with the memory and over the ranks, are finite."""
        largest = float(self._kernels.largest(gradients))
        return self._headroom.suffices(largest, elements, factor) or self._too_large(largest)

    def _too_large(self, magnitude: float) -> bool:
        if math.isfinite(magnitude):
            where = (self._context.rank, self._context.bucket, self.steps)
            _LOG.warning("rank %d: bucket %d, step %d: gradients are sent dense, as sums might overflow", *where)
        return False

    def _scales(self, conditions: Conditions) -> _Scales:
        gradient = self.factor / conditions.loss_scale
        update = conditions.learning_rate / conditions.loss_scale * self.factor
        old = self._units
        if not (old.gradient and gradient):
            return _Scales(_Units(update or old.update, gradient))
        carry = old.gradient / gradient
        if conditions.scale_free:
            return _Scales(_Units(update or old.update, gradient), carry, carry)
        rescale = old.update / update if update else carry
        if conditions.momentum_after:
            memory = min(carry, rescale)
            earlier = old.update / memory if memory else update
            return _Scales(_Units(update, gradient, mean=True), carry, memory, earlier)
        # As rates, without the loss scale.
        paused = old.update > 0 and update * carry <= old.update * float(np.finfo(self._context.like.dtype).eps)
        return _Scales(old if paused else _Units(update, gradient), carry, carry if paused else rescale, paused=paused)

    def _send_dense(self, gradients: Segments, outputs: Segments, momentum: Momentum | None, carry: float) -> None:
        """Send the gradients without a selection, and leave the memory unchanged.

        NaN, Inf or a sum that overflows reaches every rank as in dense training, so that a GradScaler skips the step
        on all of them, and no residual is poisoned.
        """
        size = self._context.size
        self._enter("exchange", entries=size)
        self.sent = None
        dense = np.zeros(size, self._context.like.dtype, like=self._context.like)
        self._kernels.accumulate(gradients, dense)
        total = SparseVector.full(self._transport.allreduce(dense))  # not rounded
        # The units stay those of the memory, which does not change.
        if momentum is not None:  # else it was taken into account in the exchange that this one resumes
            total = self.handover.gradient(total, momentum, dense=True, carry=carry)
        self.counts.nonfinite += 1
        self.counts.exchanged(size, size, size, size, "dense")
        self._enter("apply")
        self._scatter(total, outputs)

    def _send_sparse(
        self,
        gradients: Segments,
        outputs: Segments,
        conditions: Conditions,
        scales: _Scales,
        mine: Array,
        relies: bool,
        resumes: bool,
    ) -> None:
        """Exchange a selection; if a rank's gradients turn out not to be safe to add, send only those, dense.

        ``mine`` are the numbers of this rank that are summed: unsafe, working, elements, epochs, resuming. If the step
        relies on the facts of the step before, they are still to be summed.
        """
        safe = not mine[0] % _REPLACED
        # If no rank had a backward pass, which is not known yet, velocities have to stay as they are.
        taken = () if not safe or (relies and conditions.idle and self._sparse.replaces_momentum) else gradients
        others = _beyond(taken, outputs)
        step = Step.of(
            conditions,
            number=self.steps,
            gradients=taken,
            epoch=self._facts.epoch if conditions.idle or relies else conditions.epoch,
            # A step that may be undone may need its gradients again.
            clear=others is not None and not self._context.undoable,
            carry=scales.carry,
            resumes=resumes,
        )
        # The same on every rank, even if parameters are held on some ranks only.
        plan = self._plan(step, -(-self._facts.elements // self._context.ranks))
        # If no element is active, for example while all parameters are frozen, momentum does not change.
        step = replace(step, dense=plan.plain if plan.elements else self.handover.plain)
        norms = Norms(step) if self._measuring else None
        empty = self._remembers_nothing
        memory = self._pausing if scales.paused else self.memory
        accumulator = memory.open(step, scales.memory)
        vector, density, k = self._take(accumulator, plan, step)
        self._units = scales.after(density)
        self.handover.rescale(scales.kept)
        self._note(density)
        late = self._context.undoable and self._facts.resuming == 0
        if late:
            magnitude = accumulator.magnitude(vector)
            safe = self._headroom.holds(magnitude) or self._too_large(magnitude)
            mine[0] += (not safe) - mine[0] % _REPLACED
        self._enter("exchange", entries=vector.values.size)
        asked = self._agreement.begin_allreduce(mine) if relies or late else None
        try:
            vector = self.collective.extend(accumulator, vector, k)
            sent = vector if safe else replace(vector, values=np.zeros_like(vector.values))
            own = accumulator.inside(zero=not safe)
            if own is None or vector.indices is None:
                exchange: Exchange = self._collective(plan).allreduce(sent, k)
            else:
                exchange = self._owning.allreduce_owned(sent, k, own)
            sums = mine if asked is None else asked.wait()
            unsafe = self._learn(sums) if relies else bool(sums[0] % _REPLACED)
        except BaseException as error:
            if asked is not None and not isinstance(error, NoBackwardError):  # may be in flight
                keep_alive([asked.wait])
            memory.close(accumulator, vector, vector)  # nothing was delivered: everything is kept
            raise
        if unsafe:  # sent in vain
            carry = scales.carry
            if self._context.undoable:
                self.undo()
            else:
                memory.close(accumulator, vector, vector)
                gradients = () if safe else gradients  # those that are safe stay in the memory
                carry = scales.once
            self._send_dense(gradients, outputs, step.momentum, carry)
            return
        self._count(plan, k, vector, exchange)
        self._enter("apply")
        exchange = self._limited(exchange, scales.carry, step.dense)
        if norms is not None:
            norms.taken(accumulator, vector)
            norms.returned(accumulator, exchange.returned)
            self._measuring = not norms.note(self.counts)
        memory.close(accumulator, vector, exchange.returned)
        self.sparsifier.observe(exchange.total)
        self.steps += 1
        self.changed = not (scales.paused or (step.dense and empty and self._remembers_nothing))
        self._dense = step.dense
        total = self.handover.gradient(exchange.total, self._momentum(step, step.number), step.dense, scales.once)
        self.sent = None if total.indices is None else total.head(_SAMPLE)
        if not accumulator.cleared:
            self._scatter(total, outputs)
        else:
            self._scatter(total, taken, cleared=True)
            if others:
                self._scatter(total, others)

    def _limited(self, exchange: Exchange, carry: float, dense: bool) -> Exchange:
        """Limit what is delivered to a multiple of the mean of earlier steps; every rank keeps its part of the rest."""
        limit = None if self._sparse.momentum is None else self._sparse.momentum.limit
        if limit is None or dense:
            return exchange
        norm = math.sqrt(self._kernels.square_norm([(0, exchange.total.values)]))  # the same on every rank
        mean = self._norm * carry or norm
        factor = min(1.0, limit * mean / norm) if norm and self.steps >= _FILLING else 1.0
        self._norm = mean + (factor * norm - mean) / _MEAN_OVER
        if factor == 1:
            return exchange
        rest = exchange.total.times((1 - factor) / self._context.ranks)
        return Exchange(exchange.total.times(factor), exchange.returned.plus(rest))

    def _plan(self, step: Step, elements: int) -> _Plan:
        """Decide k, dense or sparse, and the algorithm, before anything is selected."""
        densities = self.schedule.densities(step)
        ks = [self._sparse.k(elements, density) for density in densities]
        dense = 0 < elements <= ks[0] or self.collective.decide(self._context.size, ks[0])
        wire = (self.schedule.dense_wire if densities[0] == 1 else None) or self._sparse.dense_wire
        return _Plan(elements, densities, ks, dense, None if step.number < self._sparse.dense_steps else wire)

    def _collective(self, plan: _Plan) -> Any:
        """Return the configured collective, or a dense one that rounds to another format or not at all."""
        wire = plan.wire
        if wire == self._sparse.dense_wire:
            return self.collective
        if wire not in self._rounded:
            self._rounded[wire] = self._sparse.rounded(wire, self._context, self._transport)
        return self._rounded[wire]

    def _take(self, accumulator: Accumulator, plan: _Plan, step: Step) -> tuple[SparseVector, float, int]:
        """Take entries out of the accumulator; return them with their density and k."""
        if plan.dense:
            return accumulator.take_all(), 1.0, plan.ks[0]
        region = None if self._owning is None else self._owning.region(self._context.size)
        others = accumulator if region is None else accumulator.outside(*region)
        vector = self.sparsifier.take(others, plan.ks[0], step)
        if len(plan.ks) == 1:
            return vector, plan.densities[0], plan.ks[0]
        levels = [vector]
        for k in plan.ks[1:]:
            levels.append(self.sparsifier.narrow(levels[-1], k, step))  # saves a selection from the bucket
        square_norm = self._kernels.square_norm
        squares = [square_norm([(0, level.values)]) for level in levels]
        chosen, gains = self.schedule.choose(squares, lambda: square_norm(accumulator.active()))
        metrics.mark("weigh", bucket=self._context.bucket, step=self.steps, gains=gains, chosen=chosen)
        if chosen is None:
            accumulator.put_back(vector)
            return accumulator.take_all(), 1.0, plan.ks[0]
        accumulator.put_back(vector.without(levels[chosen]))
        return levels[chosen], plan.densities[chosen], plan.ks[chosen]

    def _note(self, density: float) -> None:
        if metrics.recording:
            metrics.mark("density", bucket=self._context.bucket, step=self.steps, density=density)
        if density != self._density and self._context.rank == 0:
            _LOG.info("bucket %d, step %d: density %.3g", self._context.bucket, self.steps, density)
        self._density = density

    def _count(self, plan: _Plan, k: int, vector: SparseVector, exchange: Exchange) -> None:
        algorithm = "_".join(["dense", plan.wire] if plan.wire else ["dense"])
        if vector.indices is not None:
            algorithm = getattr(self.collective, "choice", self._algorithm)
        entries, totals = vector.values.size, exchange.total.values.size
        self.counts.exchanged(plan.elements, min(k, plan.elements), entries, totals, algorithm)

    def forget(self) -> None:
        """Forget the state before the last step: until the next one begins, there is nothing to undo."""
        self._kept = False

    def undo(self) -> None:
        """Return to the state before the last step."""
        if self._kept:
            self._restore(self._before)
            self.changed = False

    def reset(self) -> None:
        """Return to the state of a new pipeline; a collective call."""
        memory, sparsifier, collective, schedule = self._sparse.build(self._context, self._transport)
        new = {"memory": memory, "sparsifier": sparsifier, "collective": collective, "schedule": schedule}
        states = {name: rule.state_dict() for name, rule in new.items()}
        handover = Handover(self._context).state_dict()
        units = {"unit": 0.0, "gradient_unit": 0.0, "mean_unit": False}
        counts = {"steps": 0, "norm": 0.0, "facts": list(_Facts()), "stable": False}
        self._restore({**units, **counts, **states, "handover": handover})
        self._kept = self.changed = False

    @property
    def sends_signs(self) -> bool:
        """Return whether only signs of everything are sent, after the dense steps at the start."""
        return self._sparse.dense_wire == "sign"

    @property
    def gradient_unit(self) -> float:
        """Factor that converts velocities and what was delivered to a mean gradient without the loss scale."""
        return self._units.gradient

    def replace_momentum(self) -> None:
        """Note that the optimizer's momentum has been replaced, unless this pipeline has loaded a state that fits it.

        The velocity is dropped. In the next step all ranks learn of it.
        """
        if self._sparse.takes_momentum_over and not self._loaded:
            self.velocity[...] = 0
            self._replaced_here = True

    def commit(self) -> None:
        """Note that the optimizer has applied the last step."""
        self.handover.commit()
        self._replaced_here = self._loaded = False

    @property
    def velocity(self) -> Array:
        """Velocity of this rank, not copied; only if the memory applies momentum."""
        velocity: Array = self.memory.state_dict()["velocity"]
        return velocity

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the four rules on this rank, the units of the memory and the number of steps."""
        return {
            "unit": self._units.update,
            "gradient_unit": self._units.gradient,
            "mean_unit": self._units.mean,
            "steps": self.steps,
            "facts": list(self._facts),
            "stable": self._stable,
            "norm": self._norm,
            "memory": self.memory.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "collective": self.collective.state_dict(),
            "schedule": self.schedule.state_dict(),
            "handover": self.handover.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned for the same configuration and bucket; other keys are ignored.

        Raises:
            ValueError: A part is missing, of another type or size, not finite, or out of range. The pipeline keeps its
                state.
        """
        own = self.state_dict()
        before = snapshot(own)
        try:
            mine = {key: value for key, value in state.items() if key in own}
            require_like(mine, own)
            require_finite(mine, "state")
            self._restore(mine)
            self._loaded, self._replaced_here = True, False
        except Exception as error:  # a custom rule may raise anything
            self._restore(before)
            raise ValueError(
                f"rank {self._context.rank}: bucket {self._context.bucket} cannot load this state: load an undamaged "
                f"one of the same model and configuration: {error if isinstance(error, ValueError) else repr(error)}"
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        self._headroom.forget()
        update, gradient = (checked_number(state[key], key) for key in ("unit", "gradient_unit"))
        self._units = _Units(update, gradient, checked_flag(state["mean_unit"], "mean_unit"))
        self.steps = checked_integer(state["steps"], "steps")
        self._facts = _Facts(*(checked_integer(number, "facts") for number in state["facts"]))
        self._stable = checked_flag(state["stable"], "stable")
        self._norm = checked_number(state["norm"], "norm")
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.collective.load_state_dict(state["collective"])
        self.schedule.load_state_dict(state["schedule"])
        self.handover.load_state_dict(state["handover"])

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size."""
        mine, notes = self.state_dict(), []
        for state in states:
            of_gradients = state["mean_unit"] or state["memory"].get("of_gradients")
            names = ["gradient_unit"] if of_gradients else ["unit", "gradient_unit"]
            own, first = ([one[name] for name in names] for one in (state, leader))
            if state["memory"] and own != first:
                raise ValueError(
                    f"rank {self._context.rank}: residuals of bucket {self._context.bucket} have different units {own} "
                    f"and {first}, as the learning rate changed while ranks were in join(): load them with the world "
                    "size they were saved with, or save again after a step of all ranks"
                )
        kept = ("unit", "gradient_unit", "mean_unit", "steps", "norm", "schedule", "handover")
        merged = {**mine, **{key: leader[key] for key in kept}}
        merged |= {"facts": list(_Facts()), "stable": False}
        merged["memory"] = self.memory.merge([state["memory"] for state in states])
        if self.sparsifier.replicated:
            merged["sparsifier"] = leader["sparsifier"]
        elif mine["sparsifier"]:
            notes.append(f"thresholds of {type(self.sparsifier).__name__} start from scratch")
        if mine["collective"]:
            notes.append(f"thresholds and regions of {type(self.collective).__name__} start from scratch")
        return merged, notes


def _beyond(gradients: Segments, outputs: Segments) -> list[tuple[int, Array]] | None:
    """Return the outputs that are not arrays of the gradients; None where a gradient is not an output."""
    others, found = [], 0
    for start, array in outputs:
        if found < len(gradients) and gradients[found][0] == start and gradients[found][1] is array:
            found += 1
        else:
            others.append((start, array))
    return others if found == len(gradients) else None

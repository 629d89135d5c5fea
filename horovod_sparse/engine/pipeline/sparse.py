"""Pipeline of a bucket from which a selection is sent."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse.engine.pipeline.agreement import Facts
from horovod_sparse.engine.pipeline.remembered import Remembering
from horovod_sparse.engine.pipeline.rules import Selection
from horovod_sparse.engine.pipeline.units import Scales
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.rules import Conditions, Mode, Momentum, Reduced, SparseVector, Step

_LOG = logging.getLogger("horovod_sparse")
_SAMPLE = 64  # entries


class _Given(NamedTuple):
    """Input of a step.

    Attributes:
        gradients: Gradients of this rank.
        outputs: Arrays that receive the result.
        conditions: Conditions of the step.
        scales: Factors that follow from them.
        elements: Number of elements of the gradients.
    """

    gradients: Segments
    outputs: Segments
    conditions: Conditions
    scales: Scales
    elements: int


class SparsePipeline(Remembering):
    """Memory, sparsifier, collective and schedule of one bucket.

    Invariant: total + sum over ranks of the new memory = sum over ranks of (scale * old memory + gradients), where the
    scale follows from the units of the memory: see ``Units``.

    If the memory applies the optimizer's momentum, total is a velocity, and the optimizer gets the gradient with which
    its own momentum arrives at it: see ``Handover``.

    Whether the gradients of all ranks are finite is known after a message from each. A step takes one of three paths:
    the ranks agree before the selection, together with the exchange, or on what they have summed.
    """

    def _run(self, gradients: Segments, outputs: Segments, conditions: Conditions, resumes: bool) -> None:
        self._enter("select")
        # Each rank may have loaded momentum of its own before this bucket was created.
        self._replaced_here |= conditions.momentum.begun and not (self.steps or self._loaded)
        scales = self._units.scales(conditions, self.factor, self._epsilon)
        given = _Given(gradients, outputs, conditions, scales, sum([array.size for _, array in gradients]))
        if resumes:
            self._agree_before(given, resumes=True)
            return
        self.changed = False
        if self._context.undoable:
            self._keep()
            self._agree_on_sums(given)
        elif self._agreement.stable:
            self._agree_together(given)
        else:
            self._agree_before(given)

    def _agree_before(self, given: _Given, resumes: bool = False) -> None:
        """Agree before the selection, as the facts of the last steps have changed, or may have."""
        mine = self._facts(given, self._can_add(given), resumes)
        self._enter("agree")
        if self._learn(self._agreement.sum(mine)):
            # Nothing was selected, which would have rescaled what the buffer holds.
            self._send_dense(given, given.gradients, None if resumes else given.scales.carry)
            return
        self._enter("select")
        gradients = self._reopen_last_step(given) if resumes else given.gradients
        selection = self._select(given, gradients, resumes=resumes and not self._mode.plain)
        self._enter("exchange", entries=selection.vector.values.size)
        with selection:
            reduced = self.rules.exchange(selection)
        self._deliver(given, selection, reduced)

    def _agree_together(self, given: _Given) -> None:
        """Rely on the facts of the step before, and agree on those of this one together with the exchange."""
        safe = self._can_add(given)
        mine = self._facts(given, safe)
        selection = self._select(given, given.gradients if safe else (), relies=True)
        self._enter("exchange", entries=selection.vector.values.size)
        sums = self._agreement.begin_sum(mine)
        with selection:
            reduced = self.rules.exchange(selection, safe)
            unsafe = self._learn(sums())
        if unsafe:  # sent in vain; gradients that are safe stay in the memory
            selection.take_back()
            # The selection has rescaled what the buffer holds, unless the memory pauses.
            self._send_dense(given, () if safe else given.gradients, given.scales.once)
        else:
            self._deliver(given, selection, reduced)

    def _agree_on_sums(self, given: _Given) -> None:
        """Select first, and agree on whether all sums are finite: saves a pass, unless owners keep sums."""
        mine, relies = self._facts(given, safe=True), self._agreement.stable
        if not relies:
            self._enter("agree")
            self._learn(self._agreement.sum(mine))  # no rank is unsafe yet
            self._enter("select")
        selection = self._select(given, given.gradients, relies=relies)
        magnitude = selection.accumulator.magnitude(selection.vector)
        safe = self._headroom.holds(magnitude) or self._too_large(magnitude)
        self._enter("exchange", entries=selection.vector.values.size)
        sums = self._agreement.begin_sum(mine._replace(unsafe=not safe))
        with selection:
            reduced = self.rules.exchange(selection, safe)
            unsafe = self._learn(sums()) if relies else sums().unsafe
        if unsafe:
            self.undo()  # also the rescaling
            self._send_dense(given, given.gradients, given.scales.carry)
        else:
            self._deliver(given, selection, reduced)

    def _facts(self, given: _Given, safe: bool, resumes: bool = False) -> Facts:
        """Return what this rank contributes to the agreement."""
        idle, epoch = given.conditions.idle, given.conditions.epoch
        return Facts(
            working=not idle,
            elements=given.elements,
            # A rank in `hvd.join()` does not know the epoch and gets it from working ranks. 0 stands for none.
            epochs=0 if idle or epoch is None else epoch + 1,
            resuming=resumes,
            unsafe=not safe,
            replaced=self._replaced_here,
        )

    def _learn(self, sums: Facts) -> bool:
        """Learn the facts from their sums; return True, with nothing changed, if a rank's gradients are not safe."""
        self.replaced = sums.replaced > 0
        if self.replaced:
            self.handover.forget()
            if not self._replaced_here:
                self.velocity[...] = 0
        if not sums.working:
            raise self._no_backward()
        # Without a memory, the selection of a discarded exchange would be lost.
        self._agreement.note(sums, self.rules.schedule.predictable and not self._sparse.memory.keeps_nothing)
        return sums.unsafe > 0

    def _can_add(self, given: _Given) -> bool:
        """Return whether the gradients, and their sums with the memory and over the ranks, are finite."""
        largest = float(self._kernels.largest(given.gradients))
        factor = max(given.scales.carry, given.scales.memory)
        return self._headroom.suffices(largest, given.elements, factor) or self._too_large(largest)

    def _too_large(self, magnitude: float) -> bool:
        if math.isfinite(magnitude):
            where = (self._context.rank, self._context.bucket, self.steps)
            _LOG.warning("rank %d: bucket %d, step %d: gradients are sent dense, as sums might overflow", *where)
        return False

    def _reopen_last_step(self, given: _Given) -> Segments:
        """Let this step continue the last one, whose result no optimizer has applied; return the gradients to exchange.

        The gradients were added to the result on every rank, and all ranks exchange it once more. If the memory applies
        the optimizer's momentum, the result is an effective gradient: it is subtracted, and the memory takes back the
        velocities that it was made of.
        """
        added = np.zeros(self._context.size, self._context.like.dtype, like=self._context.like)
        self._kernels.accumulate(given.gradients, added)
        self.steps -= 1
        momentum = self._momentum(given.conditions, self.steps)
        if self._sparse.takes_momentum_over and (momentum.factor or momentum.averages):
            last = self.handover.last_gradient(momentum).times(-self.factor)
            self._kernels.add(last.indices, last.values, added)
            memory: Any = self.rules.memory
            memory.take_back(self.handover.next.times(1 / self._context.ranks))
            self._headroom.forget()
        return [(start, added[start : start + array.size]) for start, array in given.gradients]

    def _select(self, given: _Given, gradients: Segments, *, relies: bool = False, resumes: bool = False) -> Selection:
        """Take what is sent out of the memory and the gradients.

        Args:
            given: What the step gets.
            gradients: Gradients to add to the memory.
            relies: Whether this step's facts are not known yet, and those of the step before are used.
            resumes: Whether the gradients were added to the result of the last selection.
        """
        conditions, facts = given.conditions, self._agreement.facts
        # If no rank had a backward pass, which is not known yet, velocities have to stay as they are.
        taken = () if relies and conditions.idle and self._sparse.replaces_momentum else gradients
        step = Step.of(
            conditions,
            number=self.steps,
            gradients=taken,
            epoch=facts.epoch if conditions.idle or relies else conditions.epoch,
            # A step that may be undone may need its gradients again.
            clear=not self._context.undoable and _beyond(taken, given.outputs) is not None,
            carry=given.scales.carry,
            resumes=resumes,
        )
        # The same on every rank, even if parameters are held on some ranks only.
        plan = self.rules.plan(step, -(-facts.elements // self._context.ranks))
        # If no element is active, for example while all parameters are frozen, momentum does not change.
        mode = plan.mode if plan.elements else self.handover.mode
        if mode is not step.mode:
            step = replace(step, mode=mode)  # a copy takes microseconds
        selection = self.rules.select(step, plan, given.scales, self._measuring)
        self._units = given.scales.after(selection.density)
        self.handover.rescale(given.scales.kept)
        return selection

    def _deliver(self, given: _Given, selection: Selection, reduced: Reduced) -> None:
        """Close the step, and write its total into the outputs."""
        plan, step, scales, plain = selection.plan, selection.step, given.scales, selection.step.mode.plain
        accumulator, vector = selection.accumulator, selection.vector
        k, entries = min(selection.k, plan.elements), vector.values.size
        self.counts.exchanged(plan.elements, k, entries, reduced.total.values.size, self.rules.algorithm(selection))
        self._enter("apply")
        if not plain:
            reduced = self._limit.apply(reduced, scales.carry, self.steps)
        if selection.norms is not None:
            selection.norms.taken(accumulator, vector)
            selection.norms.returned(accumulator, reduced.returned)
            self._measuring = not selection.norms.note(self.counts)
        selection.close(reduced.returned)
        self._headroom.receives(reduced.returned)
        self.rules.sparsifier.observe(reduced.total)
        self.steps += 1
        emptied = plain and selection.was_empty and self.rules.remember_nothing
        self.changed = not (scales.paused or emptied)
        self._mode = step.mode
        gradient = self.handover.gradient(reduced.total, self._momentum(step, step.number), step.mode, scales.once)
        # While the memory takes no part, its unit is not that of what was delivered.
        sampled = not (plain or scales.paused or gradient.indices is None)
        self.sample = gradient.head(_SAMPLE) if sampled else None
        if not accumulator.cleared:
            self._scatter(gradient, given.outputs)
        else:
            self._scatter(gradient, step.gradients, cleared=True)
            if others := _beyond(step.gradients, given.outputs):
                self._scatter(gradient, others)

    def _send_dense(self, given: _Given, gradients: Segments, carry: float | None) -> None:
        """Send gradients without a selection, and leave the memory unchanged.

        NaN, Inf or a sum that overflows reaches every rank as in dense training, so that a GradScaler skips the step
        on all of them, and no residual is poisoned.

        Args:
            given: What the step gets.
            gradients: Gradients to send.
            carry: Factor on what the optimizer's buffer holds; None: it is part of the gradients, as they were added to
                the result of the last exchange.
        """
        size = self._context.size
        self._enter("exchange", entries=size)
        self.sample = None
        dense = np.zeros(size, self._context.like.dtype, like=self._context.like)
        self._kernels.accumulate(gradients, dense)
        total = SparseVector.full(self._transport.allreduce(dense))  # not rounded
        # The units stay those of the memory, which does not change.
        if carry is not None:
            total = self.handover.gradient(total, given.conditions.momentum, Mode.ALL, carry)
        self.counts.nonfinite += 1
        self.counts.exchanged(size, size, size, size, "dense")
        self._enter("apply")
        self._scatter(total, given.outputs)

    @staticmethod
    def _momentum(conditions: Conditions, number: int) -> Momentum:
        return conditions.momentum if number else replace(conditions.momentum, share=conditions.momentum.first)


def _beyond(gradients: Segments, outputs: Segments) -> list[tuple[int, Array]] | None:
    """Return the outputs that are not arrays of the gradients; None where a gradient is not an output."""
    others, found = [], 0
    for start, array in outputs:
        if found < len(gradients) and gradients[found][0] == start and gradients[found][1] is array:
            found += 1
        else:
            others.append((start, array))
    return others if found == len(gradients) else None

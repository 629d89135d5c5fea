"""State of a pipeline with a selection between two steps, also for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline.agreement import Agreement, Facts
from horovod_sparse.engine.pipeline.base import Pipeline
from horovod_sparse.engine.pipeline.handover import Handover
from horovod_sparse.engine.pipeline.headroom import Headroom
from horovod_sparse.engine.pipeline.limit import Limit
from horovod_sparse.engine.pipeline.rules import Rules
from horovod_sparse.engine.pipeline.units import Units
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import BucketContext, Mode, snapshot
from horovod_sparse.rules.states import checked_flag, checked_integer, checked_number, require_finite, require_like
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic

_LOG = logging.getLogger("horovod_sparse")


class Remembering(Pipeline):
    """Rules, units, handover and counts of one bucket, without the steps.

    Args:
        sparse: The configuration.
        context: The bucket and the rank.
        transport: The ranks that take part.
        agreement: Channel for the facts that the ranks agree on in every step.
        consensus: Channel of ``context.consensus``.
        factor: Factor on the totals; 1/P averages.

    Attributes:
        rules: Memory, sparsifier, collective and schedule.
        handover: What the optimizer's own momentum holds of what was delivered.
        replaced: Whether any rank's momentum was replaced before the last step.
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
        self._agreement, self._consensus = Agreement(agreement), consensus
        self._sparse = sparse
        self._units = Units()
        self._epsilon = float(np.finfo(context.like.dtype).eps)
        self._before: dict[str, Any] = {}  # state before the last step, if it may be undone
        self._kept = False  # whether that step has begun
        self.rules = Rules(sparse, context, transport)
        self._headroom = Headroom(context, self.rules.memory)
        keepers = 1 if context.scatters else context.ranks  # of what a total leaves out
        self._limit = Limit(None if sparse.momentum is None else sparse.momentum.limit, keepers)
        self.handover = Handover(context)
        self.replaced = False
        self._replaced_here = False  # on this rank, since the last step of the optimizer
        self._loaded = False  # a state, since the last step
        self._mode = Mode.SELECT  # of the last step

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received for this bucket, in exchanges and sums of its rules."""
        total = Traffic()
        for part in (self.rules.collective.traffic, self._consensus.traffic):
            total.add(part)
        return total

    @property
    def rounds(self) -> int:
        """Rounds of messages so far, including those of agreements."""
        return self.traffic.rounds + self._agreement.transport.traffic.rounds

    @property
    def gradient_unit(self) -> float:
        """Factor that converts velocities and what was delivered to a mean gradient without the loss scale."""
        return self._units.gradient

    @property
    def velocity(self) -> Array:
        """Velocity of this rank, not copied; only if the memory applies momentum."""
        velocity: Array = self.rules.memory.state_dict()["velocity"]
        return velocity

    def replace_momentum(self) -> None:
        """Drop the velocity, and let all ranks learn in the next step that momentum was replaced."""
        if self._sparse.takes_momentum_over and not self._loaded:
            self.velocity[...] = 0
            self._replaced_here = True

    def drop_momentum(self, start: int, end: int) -> None:
        """Drop the velocity of some positions, and what the optimizer holds of it; the same positions on all ranks."""
        self.velocity[start:end] = 0
        self.handover.drop(start, end)

    def commit(self) -> None:
        """Note that the optimizer has applied the last step."""
        self.handover.commit()
        self._replaced_here = self._loaded = False

    def _keep(self) -> None:
        """Keep the state before a step; copy what the step changes in place."""
        state = self.state_dict()
        left = {"memory": state.pop("memory")} if getattr(self.rules.memory, "alternates", False) else {}
        self._before = {**snapshot(state, self._before), **left}
        self._kept = True

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
        rules = Rules(self._sparse, self._context, self._transport).state_dict()
        counts = {"steps": 0, "norm": 0.0, "facts": list(Facts()), "stable": False}
        self._restore({**Units().state_dict(), **counts, **rules, "handover": Handover(self._context).state_dict()})
        self._kept = self.changed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the four rules on this rank, the units of the memory and the number of steps."""
        return {
            **self._units.state_dict(),
            "steps": self.steps,
            "facts": list(self._agreement.facts),
            "stable": self._agreement.stable,
            "norm": self._limit.norm,
            **self.rules.state_dict(),
            "handover": self.handover.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, as ``Pipeline.load_state_dict``."""
        own = self.state_dict()
        before = snapshot(own)
        try:
            mine = {key: value for key, value in state.items() if key in own}
            if _on_other_nodes(mine.get("collective"), own["collective"]):
                mine["collective"] = own["collective"]
                if self._context.rank == 0:
                    name, bucket = type(self.rules.collective).__name__, self._context.bucket
                    _LOG.warning("bucket %d: the ranks are on other nodes: %s starts from scratch", bucket, name)
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
        self.rules.load_state_dict(state)
        self._headroom.forget()
        self._units = Units.of(state)
        self.steps = checked_integer(state["steps"], "steps")
        self._agreement.facts = Facts(*(checked_integer(number, "facts") for number in state["facts"]))
        self._agreement.stable = checked_flag(state["stable"], "stable")
        self._limit.norm = checked_number(state["norm"], "norm")
        self.handover.load_state_dict(state["handover"])

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size."""
        mine, notes, rules = self.state_dict(), [], self.rules
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
        merged |= {"facts": list(Facts()), "stable": False}
        merged["memory"] = rules.memory.merge([state["memory"] for state in states])
        if rules.sparsifier.replicated:
            merged["sparsifier"] = leader["sparsifier"]
        elif mine["sparsifier"]:
            notes.append(f"thresholds of {type(rules.sparsifier).__name__} start from scratch")
        if mine["collective"]:
            notes.append(f"thresholds and regions of {type(rules.collective).__name__} start from scratch")
        return merged, notes


def _on_other_nodes(saved: Any, own: Mapping[str, Any]) -> bool:
    """Return whether a collective's state was saved by the same number of ranks on other nodes; the same on all ranks.

    A choice was made for their network, and which parts a rank's state has depends on its node.
    """
    before, now = (one.get("nodes") if isinstance(one, Mapping) else None for one in (saved, own))
    return isinstance(before, list) and now is not None and len(before) == len(now) and before != now

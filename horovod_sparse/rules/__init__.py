"""Terms that all rules share (memories, sparsifiers, collectives, schedules), and all that one of your own needs.

A rule is told its ``BucketContext`` when it is built and the ``Step`` when it is called. Its options are declared by
``RuleOptions``, ``integer``, ``number``, ``flag`` and ``one_of``. It works on an ``Accumulator`` or a ``SparseVector``;
a collective gives an ``Exchange``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import MAX_SIZE, Array, Segments
from horovod_sparse.rules.options import RuleOptions, flag, integer, number, one_of
from horovod_sparse.vector import Exchange, SparseVector

__all__ = [
    "ANYWHERE",
    "Accumulator",
    "Consensus",
    "Exchange",
    "Momentum",
    "Place",
    "RuleOptions",
    "SparseVector",
    "Stateless",
    "Step",
    "alone",
    "flag",
    "integer",
    "number",
    "one_of",
    "snapshot",
]

# Sums a small array, of any device, over the ranks, with the same bits on all of them.
Consensus: TypeAlias = Callable[[Array], Array]


def alone(array: Array) -> Array:
    """Consensus of one rank."""
    return array


@dataclass(frozen=True, slots=True, eq=False)
class BucketContext:
    """The place where a rule works: in one bucket, on one of the ranks.

    Attributes:
        size: Elements n of the bucket.
        like: Array, of any length, whose dtype (float32 or float64) and device the bucket has.
        bucket: The bucket's number.
        rank: This rank.
        ranks: Ranks P that take part.
        consensus: Sums numbers over them; a collective call each time.
        shared: What rules of all buckets of one model share, by its class.
        events: Counted by the rules of this bucket, by name; ``optimizer.statistics()`` shows them.
        undoable: A step may be undone: the pipeline keeps the state before it.
        threads: As many as this rank has cores to itself.
    """

    size: int
    like: Array
    bucket: int = 0
    rank: int = 0
    ranks: int = 1
    consensus: Consensus = alone
    shared: dict[type[Any], Any] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    undoable: bool = False
    threads: int = 1

    def generator(self, seed: int, step: int, *, shared: bool, level: int = 0) -> np.random.Generator:
        """A generator for one step of this bucket, the same on every rank or this rank's own.

        It is made from its arguments alone: the number of the step is all the state that a checkpoint needs. Draws that
        follow in the same step have a level of their own.
        """
        whose = 0 if shared else 1 + self.rank
        return np.random.default_rng([seed, self.bucket, step, whose, *([level] if level else [])])

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Numbers averaged over the ranks, with the same bits on all of them; a collective call."""
        means: list[float] = (self.consensus(np.array(numbers)) / self.ranks).tolist()
        return means


# Large enough for all options: to check them before there is a bucket.
ANYWHERE = BucketContext(MAX_SIZE, np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum as torch defines it: u = factor * u + share * g, and u = first * g in the first step.

    Attributes:
        factor: m, in [0, 1); 0: there is none, and u stays as it is.
        nesterov: The update is g + m u, not u. The shares are 1 then.
        share: Of the gradients after the first: 1 - dampening of SGD, 1 - beta of Adam.
        first: Of the first gradient: 1 of SGD, 1 - beta of Adam.
    """

    factor: float = 0.0
    nesterov: bool = False
    share: float = 1.0
    first: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """Conditions of one step of one bucket; but for ``idle`` and ``gradients`` the same on every rank.

    Attributes:
        learning_rate: Of the bucket's param group.
        loss_scale: Factor that a GradScaler put on the loss, and so on the gradients.
        epoch: What ``optimizer.set_epoch`` was told last; None before the first time.
        idle: This rank had no backward pass in this step.
        number: Steps of this bucket before this one, without those in which a gradient was not finite.
        gradients: This rank's gradients of the bucket.
        clear: Their arrays take the result: they may be left with zeros as soon as they are added up.
        scale_free: The optimizer divides by the gradients' own scale, as Adam does, so that what is held back counts as
            a gradient, whatever the learning rate; not as an update.
        carry: Factor that gives gradients of earlier steps this step's loss scale, and its part in the mean.
        momentum: Of the optimizer, for a memory that takes it over.
    """

    learning_rate: float = 1.0
    loss_scale: float = 1.0
    epoch: int | None = None
    idle: bool = False
    number: int = 0
    gradients: Segments = ()
    clear: bool = False
    scale_free: bool = False
    carry: float = 1.0
    momentum: Momentum = Momentum()

    @property
    def unit(self) -> float:
        """Factor that makes these gradients an update."""
        return self.learning_rate / self.loss_scale

    def square_norm(self) -> float:
        """Sum of squares of this rank's gradients, without the loss scale; a pass over them."""
        if not self.gradients:
            return 0.0
        squares: float = kernels_for(self.gradients[0][1]).square_norm(self.gradients)
        return squares / self.loss_scale**2

    def epochs(self, steps_per_epoch: int | None) -> int:
        """Epochs that have ended, by the number of steps or, for None, as the training script told.

        Raises:
            RuntimeError: The script told nothing.
        """
        if steps_per_epoch is not None:
            return self.number // steps_per_epoch
        if self.epoch is None:
            raise RuntimeError(
                "the density depends on the epoch, which is not known: call optimizer.set_epoch(epoch) at the start "
                "of every epoch (a SparseAllreduce takes epoch=epoch), or give the compression steps_per_epoch"
            )
        return self.epoch


class Stateless:
    """Gives and takes an empty state, so that checkpoints need no special case."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next step depends on the configuration alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes an empty state; ValueError for any other, which belongs to another class."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the state to load holds {sorted(state)}")


def snapshot(state: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a state, as ``state_dict`` gives it: later steps do not change it.

    Args:
        state: Nested dictionaries of arrays, on whatever device, and of what never changes in place.
        earlier: A copy that is no longer needed; its arrays are used again where they fit, as fresh memory costs a page
            fault every 4 KiB.

    Returns:
        The copy, each array on its own device.
    """
    earlier = earlier or {}
    return {key: _copy(value, earlier.get(key)) for key, value in state.items()}


def _copy(value: Any, earlier: Any) -> Any:
    if isinstance(value, dict):
        return snapshot(value, earlier)
    if not hasattr(value, "dtype"):
        return value
    if getattr(earlier, "shape", None) != value.shape or earlier.dtype != value.dtype:
        return value.copy()
    earlier[...] = value
    return earlier

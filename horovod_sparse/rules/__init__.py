"""Types shared by all rules (memories, sparsifiers, collectives, schedules), and everything a custom rule needs.

A rule takes its ``BucketContext`` when it is built and the ``Step`` when it is called. Its options are declared with
``RuleOptions``, ``integer``, ``number``, ``flag`` and ``one_of``. It works on an ``Accumulator`` or a ``SparseVector``.
A collective returns a ``Reduced``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import copied, kernels_for
from horovod_sparse.kernels.types import MAX_SIZE, Array, Segments
from horovod_sparse.rules.modes import Mode
from horovod_sparse.rules.options import RuleOptions, flag, integer, number, one_of
from horovod_sparse.vector import Reduced, SparseVector

__all__ = [
    "ANYWHERE",
    "Accumulator",
    "BucketContext",
    "Conditions",
    "Consensus",
    "Mode",
    "Momentum",
    "Reduced",
    "RuleOptions",
    "SparseVector",
    "Stateful",
    "Stateless",
    "Step",
    "alone",
    "flag",
    "integer",
    "number",
    "one_of",
    "snapshot",
]

# Sums a small array on any device over the ranks; the result is bit-identical on all of them.
Consensus: TypeAlias = Callable[[Array], Array]


def alone(array: Array) -> Array:
    """Return the array unchanged: the consensus of a single rank."""
    return array


@dataclass(frozen=True, slots=True, eq=False)
class BucketContext:
    """The bucket and the rank that a rule works for.

    Attributes:
        size: Number of elements n of the bucket.
        like: Array of any length with the dtype (float32 or float64) and device of the bucket.
        bucket: Number of the bucket.
        rank: Rank of this process.
        ranks: World size P.
        consensus: Function that sums an array over the ranks; each call is a collective call.
        shared: Objects shared by the rules of all buckets of a model, by class.
        events: Event counts of this bucket's rules, by name; ``optimizer.statistics()`` reports them.
        undoable: Whether a step may be undone. The pipeline then keeps the state before the step.
        threads: Number of threads that a kernel may use: the cores that this rank has to itself.
        layers: First positions of the parameters in the bucket, ascending from 0.
        scatters: Whether each rank gets only its part of the sums, of P equal ones, as in a reduce-scatter.
        adaptive: Whether the optimizer scales each entry by its own history, as Adam does.
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
    layers: Sequence[int] = (0,)
    scatters: bool = False
    adaptive: bool = False

    def generator(self, seed: int, step: int, *, shared: bool, level: int = 0) -> np.random.Generator:
        """Return the random generator for one step of this bucket.

        It depends on nothing but the arguments, the bucket and the rank, so a checkpoint only needs the step number.

        Args:
            seed: Seed of the rule.
            step: Number of the step.
            shared: Whether all ranks get the same generator.
            level: Number of the random stream; each further draw in the same step uses a new one.
        """
        stream = 0 if shared else 1 + self.rank
        return np.random.default_rng([seed, self.bucket, step, stream, *([level] if level else [])])

    def zeros(self) -> Array:
        """Return zeros of the bucket's size, dtype and device, written: pages of ``np.zeros`` appear in the first step.

        Not ``np.full``, which passes ``device=None`` on to CuPy's ``full``, which does not accept it.
        """
        zeros: Array = np.zeros_like(self.like, shape=(self.size,))
        return zeros

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Return numbers averaged over the ranks, bit-identical on all of them; a collective call."""
        means: list[float] = (self.consensus(np.array(numbers)) / self.ranks).tolist()
        return means


# Context of maximum size: validates options before a bucket exists.
ANYWHERE = BucketContext(MAX_SIZE, np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum as torch defines it: u = factor * u + share * g, and u = first * g in the first step.

    Attributes:
        factor: Momentum factor m in [0, 1). 0 means no momentum; u is left unchanged.
        nesterov: Whether the update is g + m u instead of u; ``share`` is then 1.
        share: Weight of every gradient after the first: 1 - dampening for SGD, 1 - beta for Adam.
        averages: Whether the optimizer's buffer is an average, which a factor of 0 overwrites, as with Adam. SGD leaves
            its buffer unchanged then.
        begun: Whether the optimizer has a buffer on this rank, from earlier steps or from a state that was loaded.
    """

    factor: float = 0.0
    nesterov: bool = False
    share: float = 1.0
    averages: bool = False
    begun: bool = False

    @property
    def first(self) -> float:
        """Weight of the gradient in the bucket's first step: SGD does not dampen the one that starts its buffer."""
        return self.share if self.averages or self.begun else 1.0


@dataclass(frozen=True)
class Conditions:
    """Settings of a step that a front end knows, equal on every rank except for ``idle`` and ``exposed``.

    Attributes:
        learning_rate: Learning rate of the bucket's param group.
        loss_scale: Factor by which a GradScaler multiplied the loss, and so the gradients.
        epoch: Epoch last passed to ``optimizer.set_epoch``; None before the first call.
        idle: Whether this rank had no backward pass in this step.
        scale_free: Whether the optimizer normalizes the scale of the gradients, as Adam does. The residual then counts
            as a gradient, independent of the learning rate, and not as an update.
        momentum: Momentum of the optimizer, for a memory that applies it before the selection.
        momentum_after: Whether the optimizer applies momentum to what is delivered, and no memory did so before.
        exposed: Seconds for which the model's exchange continued in the previous step after this rank's last gradient
            was available; 0 if not known, as on a GPU.
    """

    learning_rate: float = 1.0
    loss_scale: float = 1.0
    epoch: int | None = None
    idle: bool = False
    scale_free: bool = False
    momentum: Momentum = Momentum()
    momentum_after: bool = False
    exposed: float = 0.0


@dataclass(frozen=True)
class Step(Conditions):
    """One step of one bucket, as its rules get it: the conditions, and what the pipeline has decided.

    Attributes:
        number: Number of earlier steps of this bucket, without those that had a gradient that was not finite.
        gradients: Local gradients of the bucket.
        clear: Whether the result is written into the gradients' arrays. They may then be zeroed once they are added up.
        carry: Factor that converts gradients of earlier steps to this step's loss scale and averaging factor.
        resumes: Whether the gradients were added to a selection of the exchange before, which the optimizer has not
            applied: both belong to one step of the optimizer. Memories get only what was added.
        mode: What is sent; set for the memory, once the density is known.
    """

    number: int = 0
    gradients: Segments = ()
    clear: bool = False
    carry: float = 1.0
    resumes: bool = False
    mode: Mode = Mode.SELECT

    @classmethod
    def of(cls, conditions: Conditions, **decided: Any) -> Step:
        """Return a step under these conditions."""
        return cls(**{**vars(conditions), **decided})

    def square_norm(self) -> float:
        """Return the squared norm of the local gradients without the loss scale; one pass over them."""
        if not self.gradients:
            return 0.0
        squares: float = kernels_for(self.gradients[0][1]).square_norm(self.gradients)
        return squares / self.loss_scale**2

    def epochs(self, steps_per_epoch: int | None) -> int:
        """Return the number of completed epochs; without ``steps_per_epoch``, the epoch that the script has set.

        Raises:
            RuntimeError: ``steps_per_epoch`` is None, and the script has set no epoch.
        """
        if steps_per_epoch is not None:
            return self.number // steps_per_epoch
        if self.epoch is None:
            raise RuntimeError(
                "the density depends on the epoch, which is not known: call optimizer.set_epoch(epoch) at the start "
                "of every epoch (a SparseAllreduce takes epoch=epoch), or give the compression steps_per_epoch"
            )
        return self.epoch


class Stateful(Protocol):
    """A rule whose state belongs to a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on. Arrays are not copied: see ``snapshot``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""


class Stateless:
    """A rule with an empty state, so that checkpoints need no special case."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the next step depends on the configuration alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load an empty state; raise ValueError for any other, which belongs to another class."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the state to load holds {sorted(state)}")


def snapshot(state: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a copy of a ``state_dict`` that later steps do not change, each array on its own device.

    Args:
        state: Nested dictionaries of arrays, on any device, and of values that never change in place.
        earlier: A copy that is no longer needed. Its arrays are reused where they fit, because fresh memory costs a
            page fault every 4 KiB.
    """
    earlier = earlier or {}
    return {key: _copy(value, earlier.get(key)) for key, value in state.items()}


def _copy(value: Any, earlier: Any) -> Any:
    if isinstance(value, dict):
        return snapshot(value, earlier)
    if not hasattr(value, "dtype"):
        return value
    if getattr(earlier, "shape", None) != value.shape or earlier.dtype != value.dtype:
        return value.copy() if isinstance(value, (np.ndarray, np.generic)) else copied(value)
    earlier[...] = value
    return earlier

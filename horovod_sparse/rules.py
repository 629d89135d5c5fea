"""Terms that all rules share (memories, sparsifiers, collectives, schedules): place, step, options and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import MAX_SIZE, Array, Segments

if TYPE_CHECKING:
    from typing_extensions import Self

# Sums a small array, of any device, over the ranks, with the same bits on all of them.
Consensus: TypeAlias = Callable[[Array], Array]


def alone(array: Array) -> Array:
    """Consensus of one rank."""
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place where a rule works: in one bucket, on one of the ranks.

    Attributes:
        size: Elements n of the bucket.
        like: Array, of any length, whose dtype (float32 or float64) and device the bucket has.
        bucket: The bucket's number.
        rank: This rank.
        ranks: Ranks P that take part.
        consensus: Sums numbers over them; a collective call each time.
    """

    size: int
    like: Array
    bucket: int = 0
    rank: int = 0
    ranks: int = 1
    consensus: Consensus = alone

    def generator(self, seed: int, step: int, *, shared: bool) -> np.random.Generator:
        """A generator for one step of this bucket, the same on every rank or this rank's own.

        It is made from its arguments alone: the number of the step is all the state that a checkpoint needs.
        """
        whose = 0 if shared else 1 + self.rank
        return np.random.default_rng([seed, self.bucket, step, whose])

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Numbers averaged over the ranks, with the same bits on all of them; a collective call."""
        means: list[float] = (self.consensus(np.array(numbers)) / self.ranks).tolist()
        return means


# Large enough for all options: to check them before there is a bucket.
ANYWHERE = Place(MAX_SIZE, np.empty(0, np.float32))


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
    """

    learning_rate: float = 1.0
    loss_scale: float = 1.0
    epoch: int | None = None
    idle: bool = False
    number: int = 0
    gradients: Segments = ()

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
                "of every epoch, or give the compression steps_per_epoch"
            )
        return self.epoch


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Options of one rule: checked when they are written down, compared as values.

    Fields that cannot change a result are left out of the comparison.

    Raises:
        ValueError: A value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        """Checks each field as it was declared by ``whole``, ``number``, ``flag`` or ``one_of``."""
        for one in fields(self):
            check = one.metadata.get("check")
            if check is not None:
                check(one.name, getattr(self, one.name))

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Options out of settings, of which others may be for other rules."""
        return cls(**{one.name: settings[one.name] for one in fields(cls) if one.name in settings})

    def known(self) -> set[str]:
        """Names of the settings that ``read`` takes."""
        return {one.name for one in fields(self)}


def whole(default: int | None, *, least: int = 0, hint: str = "", free: bool = False) -> Any:
    """Declares an option that is a whole number; None is allowed where it is the default.

    Args:
        default: Its value where none is given.
        least: The smallest value allowed.
        hint: What to say to somebody who gave another value.
        free: Whether the option cannot change a result.
    """

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return _option(default, fits, f"a whole number of at least {least}", hint, free)


def number(default: Any, fits: Callable[[float], bool], range_: str, *, hint: str = "", required: bool = False) -> Any:
    """Declares an option that is a finite number; None is allowed where it is the default, unless it is required.

    Args:
        default: Its value where none is given.
        fits: Tells whether a number is in range.
        range_: The range in words, such as "in (0, 1]".
        hint: What to say to somebody who gave another value.
        required: Whether a value must be given although the default is None.
    """

    def is_one(value: Any) -> bool:
        return is_number(value) and fits(value)

    return _option(default, is_one, range_, hint, required=required)


def flag(default: bool) -> Any:
    """Declares an option that is true or false."""
    return _option(default, lambda value: isinstance(value, bool), "True or False")


def one_of(default: Any, *choices: Any, hint: str = "") -> Any:
    """Declares an option that has one of a few values; None is allowed where it is the default."""

    def is_one(value: Any) -> bool:
        return value in choices and type(value) in map(type, choices)  # True equals 1

    return _option(default, is_one, f"one of {', '.join(map(str, choices))}", hint)


def is_number(value: object) -> bool:
    """Tells whether a value is a finite number and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _option(
    default: Any, fits: Callable[[Any], bool], range_: str, hint: str = "", free: bool = False, required: bool = False
) -> Any:
    def check(name: str, value: Any) -> None:
        if not (default is None and value is None and not required) and not fits(value):
            raise ValueError(f"{name} must be {range_}, not {value!r}" + (f": {hint}" if hint else ""))

    return field(default=default, compare=not free, metadata={"check": check})


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

"""Options of rules: dataclass fields that declare their valid values and are checked on construction."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from horovod_sparse.rules.modes import Mode

# Largest integer option: kernels and generators take 64-bit integers.
_MOST = 2**63 - 1

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Options of one rule: validated on construction, compared as values.

    Fields that cannot change a result are excluded from the comparison. The class attributes state properties of the
    rule that other rules depend on; a rule overrides those that hold for it.

    Attributes:
        keeps_nothing: The memory drops what is not sent.
        elementwise: The arrays of the memory's state hold one value for each element of the bucket.
        shared_indices: The collective sends values only, so all ranks must select the same positions.
        random_positions: The sparsifier selects positions independently of the values.

    Raises:
        ValueError: A value has the wrong type or is out of range.
    """

    keeps_nothing: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    shared_indices: ClassVar[bool] = False
    random_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check each field that was declared with ``integer``, ``number``, ``flag`` or ``one_of``."""
        for option in fields(self):
            check = option.metadata.get("check")
            if check is not None:
                check(option.name, getattr(self, option.name))

    @property
    def mode(self) -> Mode:
        """Mode of every step with this collective."""
        return Mode.SELECT

    def conflict(self, sparsifier: RuleOptions, collective: RuleOptions) -> str:
        """Return why the rule does not work with these rules of its configuration, and the remedy; empty if it does."""
        del sparsifier, collective
        return ""

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return the options found in settings; settings of other rules are ignored."""
        return cls(**{option.name: settings[option.name] for option in fields(cls) if option.name in settings})

    def known(self) -> set[str]:
        """Return the names of the settings that ``read`` uses."""
        return {option.name for option in fields(self)}


def integer(default: int | None, *, least: int = 0, most: int = _MOST, hint: str = "", free: bool = False) -> Any:
    """Declare an integer option; None is allowed if it is the default.

    Args:
        default: Default value.
        least: Smallest value allowed.
        most: Largest value allowed.
        hint: Advice that is added to the error message for an invalid value.
        free: Whether the option cannot change a result.
    """

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    def range_(value: Any) -> str:
        too_large = isinstance(value, int) and value > most
        return f"an integer of at {f'most {most}' if too_large else f'least {least}'}"

    return _option(default, fits, range_, hint, free)


def number(
    default: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    hint: str = "",
    required: bool = False,
    word: str | None = None,
) -> Any:
    """Declare an option that is a finite number; None is allowed if it is the default and no value is required.

    Args:
        default: Default value.
        least: Smallest value allowed.
        most: Largest value allowed.
        above: Number that a value must exceed.
        below: Number that a value must stay below.
        hint: Advice that is added to the error message for an invalid value.
        required: Whether None is refused although it is the default.
        word: A string that is allowed, too.
    """

    def fits(value: Any) -> bool:
        if isinstance(value, str):
            return value == word
        return is_number(value) and least <= value <= most and above < value < below

    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    known = [f"{name} {bound:g}" for name, bound in bounds.items() if math.isfinite(bound)]
    range_ = " ".join(known) or "a finite number"
    if len(known) == 2:
        low = f"({above:g}" if above > least else f"[{least:g}"
        range_ = f"in {low}, {f'{below:g})' if below < most else f'{most:g}]'}"
    if word is not None:
        range_ += f", or {word!r}"
    return _option(default, fits, lambda _: range_, hint, required=required)


def flag(default: bool) -> Any:
    """Declare a boolean option."""
    return _option(default, lambda value: isinstance(value, bool), lambda _: "True or False")


def one_of(default: Any, *choices: Any, hint: str = "") -> Any:
    """Declare an option with a fixed set of values; None is allowed if it is the default."""

    def is_valid(value: Any) -> bool:
        return value in choices and type(value) in map(type, choices)  # True equals 1

    return _option(default, is_valid, lambda _: f"one of {', '.join(map(str, choices))}", hint)


def text(default: str | None, *, free: bool = False) -> Any:
    """Declare an option that is a string and not empty; None is allowed if it is the default.

    Args:
        default: Default value.
        free: Whether the option cannot change a result.
    """
    return _option(default, lambda value: isinstance(value, str) and value != "", lambda _: "a string", free=free)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number and not a bool."""
    # An integer may be too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _option(
    default: Any,
    fits: Callable[[Any], bool],
    range_: Callable[[Any], str],  # describes the valid range, given an invalid value
    hint: str = "",
    free: bool = False,
    required: bool = False,
) -> Any:
    def check(name: str, value: Any) -> None:
        if not (default is None and value is None and not required) and not fits(value):
            raise ValueError(f"{name} must be {range_(value)}, not {value!r}" + (f": {hint}" if hint else ""))

    return field(default=default, compare=not free, metadata={"check": check})

"""Parsers of command-line numbers with units."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

Item = TypeVar("Item")

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL.items()}
_BYTES = {f"{prefix}b": factor for prefix, factor in _DECIMAL.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def binary_bytes(text: str) -> int:
    """Parse a number of bytes such as 64M, with powers of 1024 as in nccl-tests."""
    return round(_number(text, _BINARY, "a number of bytes such as 65536, 64K or 1G"))


def count(text: str) -> int:
    """Parse a count such as 25.6M or 1.3B, with powers of 1000."""
    number = _number(text, {**_DECIMAL, "b": 1e9}, "a number such as 25600000, 25.6M or 1.3B")
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text!r}")
    return round(number)


def bandwidth(text: str) -> float:
    """Parse a bandwidth in bits or bytes per second such as 10Gbit or 300GB; return bytes per second."""
    if re.search(r"b(/s)?$", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} may mean bits or bytes: write 10Gbit or 10GB")
    return _number(text, {**_BITS, **_BYTES}, "a bandwidth per second such as 10Gbit or 300GB")


def seconds(text: str) -> float:
    """Parse a time such as 5us; return seconds."""
    return _number(text, _SECONDS, "a time such as 5us or 0.1ms")


def density(text: str) -> float:
    """Parse a density in (0, 1]."""
    number = _number(text, {"": 1.0}, "a density such as 0.01")
    if number > 1:
        raise argparse.ArgumentTypeError(f"a density must be in (0, 1], not {text!r}: 0.01 sends 1 % of the gradients")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers in [``least``, 2**31 - 1], the range of a C int."""

    def convert(text: str) -> int:
        digits = re.fullmatch(r"[+-]?[0-9]+", text)
        if digits and (len(text) > len("+2147483647") or int(text) >= 2**31):
            raise argparse.ArgumentTypeError(f"must be an integer of at most 2147483647, not {text[:20]!r}")
        if not digits or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, not {text!r}")
        return int(text)

    return convert


def real(least: float = 0.0, below: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers in [``least``, ``below``)."""
    limit = f", below {below:g}" if below < math.inf else ""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < below:
            raise argparse.ArgumentTypeError(f"must be a finite number of at least {least:g}{limit}, not {text!r}")
        return number

    return convert


def listed(convert: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """Return a parser of items separated by commas."""
    return lambda text: [convert(item) for item in text.split(",")]


def _number(text: str, factors: Mapping[str, float], expected: str) -> float:
    """Parse a positive finite number with a unit; units are case-insensitive."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)(?:/s)?", text.strip().lower())
    number = float(match[1]) * factors[match[2]] if match and match[2] in factors else math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
    return number

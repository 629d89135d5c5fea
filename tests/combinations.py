"""Combinations of parameters, half of which wait for the release."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def halved(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values as parameters of a test; every second one is marked ``nightly``.

    Each value is among the others and, with three axes or more, each pair of values.
    """
    parameters = []
    for combination in product(*map(enumerate, axes)):
        numbers, values = zip(*combination, strict=True)
        parameters.append(pytest.param(*values, marks=pytest.mark.nightly if sum(numbers) % 2 else ()))
    return parameters

"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import backends  # noqa: F401 - before CuPy is imported
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Overflow and NaN are ordinary inputs here."""
    with np.errstate(all="ignore"):
        yield

"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from inputs import supported_levels

from horovod_sparse.kernels import cpu


@pytest.fixture(params=supported_levels(), scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = cpu.simd_level()
    cpu.use_simd(request.param)
    yield request.param
    cpu.use_simd(before)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Overflow and NaN are ordinary inputs here."""
    with np.errstate(all="ignore"):
        yield

"""Fixtures of the front ends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def spans() -> Iterator[Any]:
    """Record spans; the value is the function that returns those since the last ``metrics.clear()``."""
    from horovod_sparse import metrics

    metrics.clear()
    metrics.enable()
    yield metrics.spans
    metrics.enable(False)
    metrics.clear()

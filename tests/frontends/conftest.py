"""Fixtures of the front ends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def group(comm: Any) -> Iterator[None]:
    """torch's process group of all ranks."""
    from torch import distributed

    from horovod_sparse import ddp

    if distributed.is_initialized():  # under torchrun, where it belongs to `comm`
        yield
        return
    ddp.init_process_group()
    yield
    distributed.destroy_process_group()


@pytest.fixture
def spans() -> Iterator[Any]:
    """Record spans; the value is the function that returns those since the last ``metrics.clear()``."""
    from horovod_sparse import metrics

    metrics.clear()
    metrics.enable()
    yield metrics.spans
    metrics.enable(False)
    metrics.clear()

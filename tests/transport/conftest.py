"""Without this, pytest-mpi takes the name of this folder for its marker, and skips what needs no mpirun."""

from __future__ import annotations

import pytest

from horovod_sparse.transport import base, doubling


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("mpi") is None:
            item.own_markers = [one for one in item.own_markers if "--with-mpi" not in one.kwargs.get("reason", "")]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few ranks count as many, which gather in log2 P rounds. Ranks must be processes."""
    monkeypatch.setattr(doubling, "DIRECT_RANKS", 1)
    monkeypatch.setattr(base, "DIRECT_RANKS", 1)

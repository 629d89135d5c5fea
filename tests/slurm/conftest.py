"""The tests that start a SLURM are collected with ``--slurm`` alone, which `make test-slurm` gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

NEED_SLURM = ("test_batch.py", "test_preemption.py", "test_restart.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slurm", action="store_true", help="start a SLURM here and run the scripts of slurm/ on it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Where this folder was not named, its option is not known.
    needs = collection_path.name in NEED_SLURM and collection_path.parent == Path(__file__).parent
    return True if needs and not config.getoption("--slurm", default=False) else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A SLURM with two nodes, ended with the session."""
    with Cluster() as running:
        yield running

"""Parametrizes tests over the collectives, each with the settings that change its behaviour."""

from __future__ import annotations

import pytest
from laws import thorough

from horovod_sparse.collectives import COLLECTIVES, auto
from horovod_sparse.costs.model import Compute
from horovod_sparse.costs.network import Link

HIERARCHIES = [
    {"inner": inner, "outer": outer, "node_ranks": ranks}
    for inner, outer, ranks in [
        ("topka", "oktopk", 2),
        ("gtopk", "topkdsa", 3),
        ("oktopk", "gtopk", None),
        # Totals that reach the broadcast in the nodes unrounded: TopkA's must be rounded there, Dense's must not.
        ("gtopk", "topka", 2),
        ("gtopk", "dense", 2),
    ]
]
CONFIGURATIONS = [(name, {}) for name in COLLECTIVES if name != "hierarchical"]
CONFIGURATIONS += [("oktopk", {"throttle": 1, "tau_threshold": 1, "tau_partition": 1})]
CONFIGURATIONS += [("hierarchical", settings) for settings in HIERARCHIES[: None if thorough() else 2]]
COMPUTE = Compute(select=0.6e-9, accumulate=0.3e-9, reduce=0.3e-9, merge=3e-9, code=3e-9)
LINKS = {"slow": Link(50e-6, 8e-9), "fast": Link(1e-6, 8e-13)}  # 1 Gbit/s, 10 Tbit/s


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that take ``name`` and ``settings`` for every collective."""
    if {"name", "settings"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("name", "settings"), CONFIGURATIONS, ids=str)


@pytest.fixture
def network(monkeypatch):
    """Give Auto a network without measuring it."""

    def install(speed):
        monkeypatch.setattr(auto, "measure_network", lambda *_: (LINKS[speed], None))
        monkeypatch.setattr(auto, "measure_compute", lambda transport, like: COMPUTE)

    return install

"""Fixtures, ranks as threads, and the rule that an MPI run in which anything was skipped has failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import launch  # before anything starts MPI
import pytest
import rank_threads
from forkserver import TRAINING_MODULES, ForkServer
from hypothesis import HealthCheck, Phase, settings

# No randomness, no database, and nothing that depends on the speed of a shared machine.
slow = [HealthCheck.too_slow]
settings.register_profile("serial", derandomize=True, database=None, deadline=None, suppress_health_check=slow)
# Under mpirun every rank must draw the same examples in the same order; to shrink one rank's failure would not.
ranks = {"phases": [Phase.explicit, Phase.generate], "suppress_health_check": list(HealthCheck)}
settings.register_profile("ranks", settings.get_profile("serial"), **ranks)

_counts = {"passed": 0, "skipped": 0}


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("ranks" if _over_mpi(config) else "serial")
    rank_threads.sizes = None if _over_mpi(config) else config.getoption("--ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    numbers = "numbers of threads that are the ranks of a test, where MPI is not used: 1,2,4"
    parser.addoption("--ranks", type=lambda text: tuple(map(int, text.split(","))), default=(3,), help=numbers)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames and rank_threads.sizes:
        metafunc.parametrize("transport", rank_threads.sizes, indirect=True, ids=lambda size: f"{size} ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of what is not the library to `make test-ci`, and run tests that take a transport on every rank."""
    for item in items:
        if item.path.parent.name in ("benchmarks", "tools"):
            item.add_marker(pytest.mark.full)
        if isinstance(item, pytest.Function) and "transport" in item.fixturenames and not _over_mpi(config):
            item.obj = rank_threads.on_every_rank(item.obj)


def _over_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", default=False))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _counts["skipped"] += 1
    elif report.when == "call" and report.passed:
        _counts["passed"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _over_mpi(session.config) or session.config.getoption("collectonly"):
        return
    if _counts["skipped"] or not _counts["passed"]:
        print(f"\nMPI run failed: {_counts['passed']} tests passed, {_counts['skipped']} were skipped")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def comm() -> Any:
    """The world, on a communicator of the tests' own."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> Any:
    """The ranks of the test: those of MPI under mpirun; else the number of threads, which get a transport each."""
    if not _over_mpi(request.config):
        return request.param
    from horovod_sparse.transport.mpi import MPITransport

    return MPITransport(request.getfixturevalue("comm"))


@pytest.fixture(scope="session")
def training_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks the ranks of examples/train.py, with torch and Horovod imported."""
    with ForkServer(tmp_path_factory.mktemp("server"), TRAINING_MODULES, launch.ENVIRONMENT) as server:
        yield server


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test register rules, which are forgotten after it."""
    from horovod_sparse.config.sparse import _KINDS

    for registry in _KINDS.values():
        monkeypatch.setattr(registry, "_rules", dict(registry))


@pytest.fixture
def put(request: pytest.FixtureRequest) -> Any:
    """Puts arrays on the host or the device, whose messages take a way to MPI; see ``exchanges.every_way``."""
    from exchanges import through

    rank = request.getfixturevalue("comm").Get_rank() if _over_mpi(request.config) else 0
    with through(request.param, rank) as put:
        yield put


@pytest.fixture
def hvd(comm: Any) -> Any:
    """Horovod, initialised once for the whole run."""
    import horovod.torch as hvd

    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")
    assert hvd.size() == comm.Get_size()
    comm.Barrier()  # a rank that is late must not eat into the next test's time limit
    return hvd

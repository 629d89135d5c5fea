"""Fixtures, ranks as threads, and the rule that an MPI run with a skipped test fails."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch  # must be imported before MPI starts
import pytest
import rank_threads
import torch_ranks
from forkserver import TRAINING_MODULES, ForkServer
from hypothesis import HealthCheck, Phase, settings

# No randomness, no database, and no dependence on the speed of a shared machine.
slow = [HealthCheck.too_slow]
settings.register_profile("serial", derandomize=True, database=None, deadline=None, suppress_health_check=slow)
# Under mpirun, all ranks must draw the same examples in the same order. Shrinking a failure of one rank would break it.
ranks = {"phases": [Phase.explicit, Phase.generate], "suppress_health_check": list(HealthCheck)}
settings.register_profile("ranks", settings.get_profile("serial"), **ranks)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("ranks" if _over_mpi(config) else "serial")
    rank_threads.sizes = None if _over_mpi(config) else config.getoption("--ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    numbers = "world sizes of tests whose ranks are threads, without MPI: 1,2,4"
    parser.addoption("--ranks", type=lambda text: tuple(map(int, text.split(","))), default=(3,), help=numbers)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames and rank_threads.sizes:
        metafunc.parametrize("transport", rank_threads.sizes, indirect=True, ids=lambda size: f"{size} ranks")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave tests of benchmarks and tools to `make test-ci`, and run tests that take a transport on every rank.

    Under torchrun, leave out tests that need Horovod; elsewhere, those of the transport over torch.distributed.
    """
    needless = "hvd" if torch_ranks.launched() else "torch_transport"
    items[:] = [item for item in items if needless not in getattr(item, "fixturenames", ())]
    for item in items:
        if item.path.parent.name in ("benchmarks", "tools"):
            item.add_marker(pytest.mark.full)
        if isinstance(item, pytest.Function) and "transport" in item.fixturenames and not _over_mpi(config):
            item.obj = rank_threads.on_every_rank(item.obj)
    yield
    if not _over_mpi(config):
        _sort_files(items)


def pytest_collection_finish() -> None:
    # The modules and tests stay until the end: the garbage collector need not look through them again and again.
    gc.freeze()


def _sort_files(items: list[pytest.Item]) -> None:
    """Put files with a long time limit first, then those with many tests: workers then end at about the same time."""
    limits: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            limits[item.path] = max(limits[item.path], limit.args[0])
    numbers = Counter(item.path for item in items)
    items.sort(key=lambda item: (limits[item.path], numbers[item.path]), reverse=True)


def _over_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", default=False))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _over_mpi(session.config) or session.config.getoption("collectonly"):
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    passed, skipped = (len(stats.get(outcome, ())) for outcome in ("passed", "skipped"))
    if skipped or not passed:
        print(f"\nMPI run failed: {passed} tests passed, {skipped} were skipped")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def comm() -> Any:
    """Private communicator of all ranks."""
    if torch_ranks.launched():
        from torch import distributed

        from horovod_sparse.transport.torch_distributed import TorchTransport

        distributed.init_process_group("gloo")
        return torch_ranks.Comm(TorchTransport.of(range(distributed.get_world_size())).connect())
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    """Folder that all ranks share; it does not exist yet."""
    return Path(comm.bcast(str(tmp_path))) / "checkpoints"


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> Any:
    """Transport of processes under a launcher; otherwise the world size, for which each thread gets a transport."""
    if not _over_mpi(request.config):
        return request.param
    if torch_ranks.launched():
        return request.getfixturevalue("comm").transport
    from horovod_sparse.transport.mpi import MPITransport

    return MPITransport(request.getfixturevalue("comm"))


@pytest.fixture(scope="session")
def torch_transport(comm: Any) -> Any:
    """Transport over torch.distributed; tests that take it run under torchrun only."""
    return comm.transport


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


@pytest.fixture(scope="session")
def training_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Server that forks ranks of examples/train.py, with torch and Horovod already imported."""
    with ForkServer(tmp_path_factory.mktemp("server"), TRAINING_MODULES, launch.ENVIRONMENT) as server:
        yield server


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register rules, which are removed after the test."""
    from horovod_sparse.config.sparse import _KINDS

    for registry in _KINDS.values():
        monkeypatch.setattr(registry, "_rules", dict(registry))


@pytest.fixture
def put(request: pytest.FixtureRequest) -> Any:
    """Provide a function that puts arrays on host or device, with a path to MPI; see ``exchanges.every_way``."""
    from exchanges import through

    rank = request.getfixturevalue("comm").Get_rank() if _over_mpi(request.config) else 0
    with through(request.param, rank) as put:
        yield put


@pytest.fixture
def hvd(comm: Any) -> Any:
    """Horovod, initialized once per run."""
    import horovod.torch as hvd

    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")
    assert hvd.size() == comm.Get_size()
    comm.Barrier()  # a late rank must not use up the time limit of the next test
    return hvd

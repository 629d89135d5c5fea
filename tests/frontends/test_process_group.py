"""torch's process group out of MPI's ranks: its variables, its meeting point, and programs that MPI did not start."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from laws import everywhere
from mpi4py import MPI
from torch import distributed

import horovod_sparse as hvs
from horovod_sparse.frontends.ddp import process_group
from horovod_sparse.frontends.ddp.process_group import init_process_group

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    """The environment without what a process group is told; as it was, afterwards."""
    for name in (*VARIABLES, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever becomes of it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def begin(environment):
    """Makes the process group; it is ended with the test."""
    yield init_process_group
    distributed.destroy_process_group()


@pytest.fixture
def asked(environment):
    """What torch would be asked for."""
    calls = []
    environment.setattr(
        distributed, "init_process_group", lambda *backend, **settings: calls.append((backend, settings))
    )
    return calls


@pytest.mark.mpi
def test_the_ranks_are_those_of_mpi_and_the_variables_say_so(comm, begin):
    begin()
    rank, ranks = comm.Get_rank(), comm.Get_size()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert everywhere(comm, (distributed.get_rank(), distributed.get_world_size()) == (rank, ranks))
    numbers = [int(os.environ[name]) for name in VARIABLES[:4]]
    assert everywhere(comm, numbers == [rank, ranks, node.Get_rank(), node.Get_size()])
    meeting = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    assert len(set(comm.allgather(meeting))) == 1
    total = torch.tensor([rank + 1.0])
    distributed.all_reduce(total)
    assert everywhere(comm, total.item() == ranks * (ranks + 1) / 2)


@pytest.mark.mpi
def test_processes_meet_where_rank_0_was_told(comm, environment, begin):
    environment.setenv("MASTER_ADDR", "localhost" if comm.Get_rank() == 0 else "nowhere.invalid")
    begin()
    assert everywhere(comm, os.environ["MASTER_ADDR"] == "localhost")
    distributed.barrier()


@pytest.mark.mpi
def test_two_programs_on_a_machine_get_ports_of_their_own(comm, environment):
    stores = [process_group._store(comm, one_node=True) for _ in range(2)]
    ports = [store.port for store in stores]
    assert everywhere(comm, ports[0] != ports[1])
    assert everywhere(comm, int(os.environ["MASTER_PORT"]) == ports[1])
    for number, store in enumerate(stores):
        if comm.Get_rank() == 0:
            store.set("program", str(number))
        assert everywhere(comm, store.get("program") == str(number).encode())
    comm.Barrier()  # the server ends with rank 0's


def test_several_nodes_meet_at_the_name_of_the_first(environment):
    hosts = []

    class Store:
        port = 1234

        def __init__(self, host, *_, **__):
            hosts.append(host)

    environment.setattr(process_group, "TCPStore", Store)
    process_group._store(MPI.COMM_WORLD, one_node=False)
    assert hosts == [socket.gethostname()]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (socket.gethostname(), "1234")


@pytest.mark.parametrize(("variable", "value"), [("WORLD_SIZE", "2"), ("SLURM_STEP_NUM_TASKS", "16")])
def test_a_process_of_several_that_mpi_does_not_know_is_refused(environment, asked, variable, value):
    environment.setenv(variable, value)
    with pytest.raises(RuntimeError, match=rf"^{variable}={value} says .*mpirun or srun --mpi=pmix "):
        init_process_group()
    assert not asked
    assert "MASTER_PORT" not in os.environ


def test_so_is_one_that_exchanges_without_a_process_group(environment):
    environment.setenv("SLURM_STEP_NUM_TASKS", "2")
    parameter = torch.nn.Parameter(torch.zeros(8))
    for make in (
        lambda: hvs.SparseAllreduce(8, hvs.Compression.topka(density=0.5)),
        lambda: hvs.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], compression=hvs.Compression.topka(density=0.5)
        ),
        lambda: hvs.LocalOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], 2, hvs.Compression.topka(density=0.5)
        ),
    ):
        with pytest.raises(RuntimeError, match=r"^SLURM_STEP_NUM_TASKS=2 says .*MPI knows only this one"):
            make()


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_a_process_alone_needs_no_launcher(environment, asked, value):
    environment.setenv("WORLD_SIZE", value)
    init_process_group(timeout=timedelta(seconds=5))
    ((backend, settings),) = asked
    assert backend == ("gloo",)
    assert (settings["rank"], settings["world_size"], settings["timeout"].seconds) == (0, 1, 5)
    assert os.environ["WORLD_SIZE"] == "1"


def test_under_torchrun_the_process_group_is_torchs_own(environment, asked):
    """Also where MPI knows this process only."""
    environment.setenv("TORCHELASTIC_RUN_ID", "a run")
    environment.setenv("WORLD_SIZE", "4")
    init_process_group("gloo", timeout=timedelta(seconds=5))
    assert asked == [(("gloo",), {"timeout": timedelta(seconds=5)})]
    assert "MASTER_PORT" not in os.environ


@pytest.fixture
def torchrun(environment):
    """Makes this process one of torchrun's, of which each has a number on its node."""

    def install(local_rank, local_ranks):
        variables = {"RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
        for name, value in {"TORCHELASTIC_RUN_ID": "a run", **variables}.items():
            environment.setenv(name, str(value))

    return install


@pytest.mark.parametrize(
    ("visible", "local_ranks", "expected"),
    [("a", 2, "gloo"), ("abc", 4, "gloo"), ("ab", 2, None), ("abcd", 2, None), ("", 4, None)],
)
@pytest.mark.parametrize("local_rank", [0, 1])
def test_under_torchrun_ranks_that_share_gpus_use_gloo(
    torchrun, asked, gpus, caplog, visible, local_ranks, expected, local_rank
):
    """NCCL refuses them. The node's first rank says so."""
    torchrun(local_rank, local_ranks)
    gpus(*visible)
    init_process_group(timeout=timedelta(seconds=5))
    assert asked == [((expected,), {"timeout": timedelta(seconds=5)})]
    warning = rf"^rank 4: the {local_ranks} ranks of node .* have only {len(visible)} GPU\(s\), so .* uses Gloo"
    warnings = [message for message in caplog.messages if re.search(warning, message)]
    assert len(caplog.messages) == len(warnings) == (expected == "gloo" and local_rank == 0)
    assert all(f"torchrun --nproc-per-node={len(visible)}" in message for message in warnings)


@pytest.mark.parametrize("under_torchrun", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_backend_that_is_passed_is_used(torchrun, asked, gpus, caplog, backend, under_torchrun):
    if under_torchrun:
        torchrun(0, 2)
    gpus("a")
    init_process_group(backend)
    assert [given for given, _ in asked] == [(backend,)]
    assert not caplog.messages


@pytest.mark.mpi
def test_without_threads_of_mpi_nothing_is_begun(comm, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: 2)
    with pytest.raises(RuntimeError, match=r"thread level 2.*MPI_THREAD_MULTIPLE"):
        init_process_group()


class Ranks:
    """Stands in for the communicators of a node's ranks and of all ranks, on rank 0."""

    def __init__(self, everyones):
        self.everyones = everyones

    def Get_rank(self):  # noqa: N802 - as in MPI
        return 0

    def allgather(self, mine):
        assert mine == self.everyones[0]
        return self.everyones


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch see GPUs by their UUIDs."""

    def install(*uuids):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
        monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)

    return install


@pytest.mark.parametrize(
    ("visible", "local_rank", "identity"),
    [([], 0, None), (["a"], 0, "a"), (["c"], 2, "c"), (["a", "b", "c", "d"], 2, "c"), (["a", "b"], 2, "a")],
    ids=["none", "one rank", "gpus-per-task=1", "all GPUs of the node", "fewer GPUs than ranks"],
)
def test_a_rank_uses_the_gpu_of_its_local_rank_among_those_that_it_sees(gpus, visible, local_rank, identity):
    gpus(*visible)
    assert process_group._gpu(local_rank) == identity


@pytest.mark.parametrize(
    ("of_node", "of_other_nodes", "expected", "warning"),
    [
        (["a", "b"], [True], "cpu:gloo,cuda:nccl", None),
        (["a", "b"], [False], "gloo", None),
        (
            ["a", "a"],
            [True],
            "gloo",
            r"rank 0: the 2 ranks of node .* have only 1 GPU\(s\), so .* Gloo.*gpus-per-task=1",
        ),
        (["a", None], [True], "gloo", r"rank 0: the 2 ranks of node .* have only 1 GPU"),
        ([None, None], [False], "gloo", None),
    ],
)
def test_nccl_where_no_rank_shares_its_gpu(gpus, caplog, of_node, of_other_nodes, expected, warning):
    gpus(*filter(None, of_node[:1]))
    own = None not in of_node and len(set(of_node)) == len(of_node)
    assert process_group._backend(Ranks([own, *of_other_nodes]), Ranks(of_node)) == expected
    assert (len(caplog.messages) == 1 and re.search(warning, caplog.text)) if warning else not caplog.messages


def test_without_nccl_gpus_use_gloo(gpus, monkeypatch):
    gpus("a")
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    assert process_group._backend(Ranks([False]), Ranks(["a"])) == "gloo"

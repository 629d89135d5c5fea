"""The transport over torch.distributed: use of NCCL, nodes, lost connections. The laws are in test_base.py."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from laws import everywhere, summed
from torch import distributed

from horovod_sparse.transport import torch_distributed
from horovod_sparse.transport.torch_distributed import TorchTransport

pytestmark = pytest.mark.mpi


class OverGloo:
    """Fake process group of NCCL: gathers tensors of different lengths, but no empty ones."""

    def __init__(self, gloo, size):
        self.gloo, self.size, self.calls = gloo, size, []

    def alltoall_base(self, *arguments):
        self.calls.append("alltoall")
        assert all(tensor.numel() for tensor in arguments[:2])
        return self.gloo.alltoall_base(*arguments)

    def allgather(self, outputs, inputs):
        self.calls.append("allgather")
        options = distributed.BroadcastOptions()
        assert all(output.numel() for output in outputs[0])
        for rank, output in enumerate(outputs[0]):
            options.rootRank = rank
            work = self.gloo.broadcast([output], options)
            work.wait()
        return work


@pytest.mark.parametrize("size", [5, 4099, 100_001])
def test_collectives_on_nccl_have_the_bits_of_those_through_the_host(torch_transport, monkeypatch, size):
    """Here on host arrays: what NCCL is called with."""
    transport, generator = torch_transport.duplicate(), np.random.default_rng(torch_transport.rank)
    nccl = OverGloo(transport._connection.gloo, transport.size)
    values = generator.standard_normal(size)
    lengths = [8 * (size + rank) for rank in range(transport.size)]
    message = generator.integers(0, 256, lengths[transport.rank], np.uint8)
    expected = transport.allreduce(values), transport.allgather(message, lengths)
    monkeypatch.setattr(transport, "_nccl", lambda like: nccl)
    total, everyones = transport.allreduce(values), transport.allgather(message, lengths)
    assert everywhere(torch_transport, total.tobytes() == expected[0].tobytes())
    assert everywhere(torch_transport, all(map(np.array_equal, everyones, expected[1])))
    # A short sum gathers all rows; a long one is made by regions.
    calls = ["allgather", "allgather"] if size == 5 else ["alltoall", "allgather", "allgather"]
    assert nccl.calls == (calls if transport.size > 1 else [])


def test_collectives_with_an_empty_part_go_through_the_host(torch_transport, monkeypatch):
    transport, last = torch_transport.duplicate(), torch_transport.size - 1
    nccl = OverGloo(transport._connection.gloo, transport.size)
    monkeypatch.setattr(transport, "_nccl", lambda like: nccl)
    for empty in ({last}, set(range(transport.size))):
        lengths = [0 if rank in empty else 8 * (rank + 1) for rank in range(transport.size)]
        everyones = transport.allgather(np.full(lengths[transport.rank], transport.rank, np.uint8), lengths)
        found = [part.tolist() for part in everyones]
        assert everywhere(torch_transport, found == [[rank] * length for rank, length in enumerate(lengths)])
    cuts = [rank * last // transport.size for rank in range(transport.size + 1)]  # fewer elements than ranks
    lengths = [end - start for start, end in itertools.pairwise(cuts)]
    message = np.arange(last, dtype=np.uint8)
    own = lengths[transport.rank]
    parts = list(transport._swap(message, cuts[:-1], lengths, np.empty(transport.size * own, np.uint8)))
    mine = message[cuts[transport.rank] : cuts[transport.rank + 1]].tolist()
    assert everywhere(torch_transport, [part.tolist() for part in parts] == [mine] * transport.size)
    assert nccl.calls == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("without", [False, True])
def test_nccl_is_used_where_each_rank_has_it_and_its_own_gpu(torch_transport, monkeypatch, shared, without):
    rank, size = torch_transport.rank, torch_transport.size
    gpu = type("Properties", (), {"uuid": "the only one" if shared else f"GPU {rank}"})
    made = []
    kind = type("Group", (), {"Options": SimpleNamespace, "__init__": lambda self, *arguments: made.append(arguments)})
    monkeypatch.setattr(torch_distributed.torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch_distributed.torch.cuda, "is_available", lambda: not (without and rank == size - 1))
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", kind, raising=False)
    monkeypatch.setattr(torch_distributed, "_on_nccl", weakref.WeakSet())
    connection = torch_transport.duplicate()
    found = connection._connect_gpus(0)
    assert everywhere(torch_transport, (found is None) == (without or (shared and size > 1)))
    # The watch has the time limits: as Gloo, NCCL has none that anybody lives to see.
    assert everywhere(torch_transport, all(options._timeout.days == 365 for *_, options in made))
    assert len(made) == (found is not None)
    # A part of the connection may use it, too, but no connection that another exchange calls at the same time.
    assert everywhere(torch_transport, (connection.duplicate()._connect_gpus(0) is None) == (found is None))
    other = TorchTransport.of(range(size)).connect()
    if found is not None:
        assert everywhere(torch_transport, other._connect_gpus(0) is None)
    torch_distributed._on_nccl.clear()
    of_another = torch_distributed._Family()
    if rank == 0:
        torch_distributed._on_nccl.add(of_another)
    assert everywhere(torch_transport, other._connect_gpus(0) is None)
    torch_distributed._on_nccl.discard(of_another)
    assert everywhere(torch_transport, (other._connect_gpus(0) is None) == (found is None))
    torch_distributed._on_nccl.clear()
    other.avoid_nccl()
    assert everywhere(torch_transport, other.duplicate()._connect_gpus(0) is None)
    monkeypatch.setenv("HOROVOD_SPARSE_CUDA_AWARE", "0" if rank == 0 else "auto")
    assert everywhere(torch_transport, torch_transport.duplicate()._connect_gpus(0) is None)


def test_ranks_of_a_machine_with_one_name_make_a_node(torch_transport, monkeypatch):
    monkeypatch.setattr(torch_distributed.socket, "gethostname", lambda: f"node {torch_transport.rank // 2}")
    nodes, size = torch_transport.duplicate().by_node(None), torch_transport.size
    assert everywhere(torch_transport, nodes.number == -(-size // 2))
    assert sum(nodes.own.allgather_object(1)) == nodes.own.size
    assert summed(torch_transport, nodes.leaders is not None) == nodes.number


def test_transports_of_other_ranks_at_the_same_time_do_not_meet(torch_transport):
    rank, size = torch_transport.rank, torch_transport.size
    parity = TorchTransport.of(range(rank % 2, size, 2)).connect()
    reverse = TorchTransport.of(range(size)[::-1]).connect()
    assert everywhere(torch_transport, parity.allgather_object(rank) == list(range(rank % 2, size, 2)))
    assert everywhere(torch_transport, reverse.allgather_object(rank) == list(range(size))[::-1])
    assert everywhere(torch_transport, reverse.members == list(range(size))[::-1])


def test_an_operation_that_fails_names_the_rank(torch_transport, monkeypatch):
    if torch_transport.size == 1:
        return
    transport, other = torch_transport.duplicate(), (torch_transport.rank + 1) % torch_transport.size

    class Closed:
        """Fake Gloo after a connection was closed."""

        def recv(self, *_):
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(transport._connection, "_gloo", Closed())
    with pytest.raises(RuntimeError, match=rf"rank {transport.rank}: rank {other} of {transport.size} has closed"):
        transport.receive(other, np.empty(0, np.uint8))
    torch_transport.barrier()

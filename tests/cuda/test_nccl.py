"""NCCL as the transport calls it, on one rank. Not collected without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import torch
from devices import on_device, to_host
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.utils.dlpack import from_dlpack

from horovod_sparse.engine.device import device_of
from horovod_sparse.transport.torch_distributed import TorchTransport


@pytest.fixture(scope="module")
def nccl() -> Iterator[Any]:
    """NCCL's process group as the transport creates it."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield TorchTransport.of([0]).connect()._connect_gpus(0)
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [8, 8008, 8_000_008])
def test_alltoall_and_allgather_on_the_stream_of_the_exchange(nccl: Any, size: int) -> None:
    with device_of(torch.device("cuda", 0)).work():
        message = on_device(np.random.default_rng(0).integers(0, 256, size, np.uint8))
        received, gathered = cupy.zeros(size, np.uint8), cupy.zeros(size, np.uint8)
        nccl.alltoall_base(from_dlpack(received), from_dlpack(message), [size], [size]).wait()
        nccl.allgather([[from_dlpack(gathered)]], [from_dlpack(message)]).wait()
        expected = to_host(message)
        assert np.array_equal(to_host(received), expected)
        assert np.array_equal(to_host(gathered), expected)

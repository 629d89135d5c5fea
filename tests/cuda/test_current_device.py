"""The current GPU: that of background threads, which begin with GPU 0, and that of arrays."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest
import torch
from devices import on_device
from mpi4py import MPI

import horovod_sparse as hvs
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions


@pytest.mark.parametrize(("devices", "expected"), [(["cpu"], -1), (["cpu", "cuda:3"], 3), (["cuda:2", "cpu"], 2)])
def test_exchanges_run_with_the_gpu_of_the_buckets(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], expected: int
) -> None:
    """Also those of buckets on the host, whose spans are timed by events of the GPU. -1 leaves it unchanged."""
    current: list[int] = []

    class Current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Current)
    seen: list[list[int]] = []
    layouts = [SimpleNamespace(torch_device=torch.device(one), keys=[], number=i) for i, one in enumerate(devices)]
    buckets: list[Any] = [
        SimpleNamespace(device=one.torch_device, layout=one, exchange=lambda *_: seen.append(list(current)))
        for one in layouts
    ]
    worker = Worker(lambda _: Reading(Conditions(0.1, epoch=0)))
    worker.add(buckets)
    for bucket in buckets:
        done = Future[None]()
        collected = SimpleNamespace(done=done, began=0)
        worker._run([SimpleNamespace(bucket=bucket, collected=collected, reading=SimpleNamespace(wait=None))])
        assert done.result() is None
        assert worker.step.error is None
    assert seen == [[expected]] * len(devices)


def test_arrays_on_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would get addresses of another GPU's memory."""
    average = hvs.SparseAllreduce(4, "topka:density=0.5", MPI.COMM_SELF)
    array, other = on_device(np.ones(4, np.float32)), on_device(np.ones(4, np.float32))
    gpus = property(lambda one: SimpleNamespace(id=int(one is other)))
    monkeypatch.setattr(cupy.ndarray, "device", gpus)
    with pytest.raises(ValueError, match=r"on GPU 1, but GPU 0 is the current one: make the call in"):
        average(other)
    assert average(array).size == 4

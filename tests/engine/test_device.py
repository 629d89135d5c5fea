"""Devices: arrays that share the tensors' memory, and clear errors where there are no kernels."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from horovod_sparse.engine import device
from horovod_sparse.engine.device import Device, device_of, real_dtype


@pytest.mark.parametrize(
    ("dtype", "expected", "sent"),
    [
        (torch.float32, np.float32, torch.float32),
        (torch.float64, np.float64, torch.float64),
        (torch.float16, np.float16, torch.float32),
        (torch.bfloat16, ml_dtypes.bfloat16, torch.float32),
    ],
)
def test_an_array_shares_the_tensors_memory(dtype, expected, sent):
    tensor = torch.arange(6, dtype=dtype).view(2, 3)
    array = Device().array_of(tensor)
    assert array.dtype == expected
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    array[4] = 7
    assert tensor[1, 1] == 7
    assert real_dtype(dtype) == sent


def test_a_device_is_one_object():
    assert device_of(torch.device("cpu")) is device_of(torch.device("cpu"))


def test_threads_that_ask_at_the_same_time_get_one_device(monkeypatch):
    """As ranks that are threads do: the streams of two devices would not be ordered."""

    class Slow:
        def __init__(self, _):
            time.sleep(0.05)

    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setitem(sys.modules, "horovod_sparse.engine.cuda", SimpleNamespace(CudaDevice=Slow))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(device_of, [torch.device("cuda", 77)] * 4))
    assert len(set(found)) == 1


def test_a_device_without_kernels_is_refused():
    with pytest.raises(ValueError, match=r"parameters are on meta, but .* on the CPU and on CUDA"):
        device_of(torch.device("meta"))


def test_cuda_without_cupy_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod_sparse.engine.cuda", None)
    with pytest.raises(ImportError, match=r"cuda:7 need CuPy.*pip install 'horovod_sparse\[cuda\d+\]'"):
        device_of(torch.device("cuda", 7))

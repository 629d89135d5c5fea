"""Memory that torch owns and CuPy uses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import cupy
import numpy as np
import pytest
import torch
from devices import emulated, to_host

from horovod_sparse.engine.cuda import array_over, nonzero, pointer_to
from horovod_sparse.engine.device import Device

PLACE = "cpu" if emulated() else "cuda:0"  # tensors of the CPU pretend to be on the device


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, np.float32),
        (torch.float64, np.float64),
        (torch.float16, np.float16),
        (torch.bfloat16, np.uint16),
        (torch.int32, np.int32),
    ],
)
def test_an_array_shares_the_memory_of_a_tensor_and_keeps_it(dtype: torch.dtype, expected: Any) -> None:
    tensor = torch.arange(12, device=PLACE).to(dtype).view(3, 4)[1:]
    alive, bits = weakref.ref(tensor), tensor.cpu().view(torch.uint8).numpy().tobytes()
    array = array_over(tensor, 0)
    assert (array.dtype, array.shape) == (expected, (8,))
    assert array.data.ptr == tensor.data_ptr()  # type: ignore[attr-defined]  # CuPy's
    del tensor
    gc.collect()
    assert to_host(array[1:])[1:].tobytes() == bits[2 * array.itemsize :]  # also by a view of it
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_an_empty_array() -> None:
    array = array_over(torch.empty(0, device=PLACE), 0)
    assert (array.size, to_host(array).size) == (0, 0)
    array = cupy.ndarray((0,), np.uint8, pointer_to(torch.UntypedStorage(0, device=PLACE), 0, 0))
    assert to_host(array).size == 0


def test_memory_in_a_reference_cycle_is_freed() -> None:
    """The garbage collector clears objects in any order."""
    storage = torch.UntypedStorage(400, device=PLACE)
    alive = weakref.ref(storage)
    cycle: list[Any] = [cupy.ndarray((100,), np.float32, pointer_to(storage, 400, 0))]
    cycle.append(cycle)
    del storage, cycle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("check", [Device().nonzero, nonzero], ids=["host", "device"])
def test_only_zeros_count_as_zero(check: Any) -> None:
    """The smallest numbers, whose squares are zero, and nonfinite numbers at any position do not."""
    last = torch.zeros(1000)
    last[-1] = 1
    tensors = [
        torch.zeros(5),
        torch.tensor([0.0, 2.0**-149]),
        torch.zeros(3, 4, dtype=torch.float16),
        torch.tensor([2.0**-24], dtype=torch.float16),
        torch.tensor([0.0, -(2.0**-133)], dtype=torch.bfloat16),
        torch.tensor([0.0, torch.nan, 0.0]),
        torch.full((7,), torch.nan, dtype=torch.bfloat16),
        torch.tensor([-torch.inf, 0.0]),
        torch.tensor([-0.0]),
        last,
    ]
    expected = [False, True, False, True, True, True, True, True, False, True]
    assert check([tensor.to(PLACE) for tensor in tensors]) == expected
    assert check([torch.tensor([-(2.0**-1074)], dtype=torch.float64, device=PLACE)]) == [True]

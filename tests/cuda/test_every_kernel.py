"""Every kernel once on awkward sizes and formats: short, so that compute-sanitizer can run it.

A sanitizer sees no access beyond an array that is part of a memory pool's block. With HOROVOD_SPARSE_TEST_NO_POOLS=1,
every array of CuPy has an allocation of its own; set PYTORCH_NO_CUDA_MEMORY_CACHING=1, too, for torch's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from backends import DEVICE, OnHost, assert_parity
from devices import emulated
from inputs import BFLOAT16, REALS, normal

from horovod_sparse.kernels import Kernels
from horovod_sparse.kernels.types import Velocity

N = 7003 if emulated() else 70_003  # the emulation runs one thread after another
K = N // 100
INDICES = np.unique(np.random.default_rng(0).integers(0, N, K)).astype(np.int32)
OTHERS = np.unique(np.random.default_rng(1).integers(0, N, 2 * K)).astype(np.int32)
NOTHING = np.empty(0, np.int32)
BITS, CODED = reference.encode_indices(INDICES)
UNITS = 256 * 5 + 7  # elements with a short last block

Case = tuple[Any, ...]


def pieces() -> list[tuple[int, Any]]:
    """Segments of every format, with gaps, of lengths that are no multiples of anything."""
    x = normal(N)
    parts = [(1, x[1:500]), (601, x[601:608].astype(np.float16)), (803, x[803 : N - 700].astype(BFLOAT16))]
    return [*((start, part.copy()) for start, part in parts), (N - 605, x[N - 605 : N - 2].astype(np.float64))]


def vector(dtype: Any, indices: Any = INDICES, seed: int = 2) -> tuple[Any, Any]:
    return indices, normal(indices.size, seed=seed).astype(dtype)


def on_buckets(dtype: Any) -> dict[str, list[Case]]:
    """Arguments of the kernels that take segments or a buffer."""
    buffer, given = normal(N, seed=1).astype(dtype), pieces()
    thresholds = OnHost(np.array([0.1, 1.0, 2.0, 3.0, 4.0]))
    return {
        "accumulate": [(given, buffer, 0.3), ([], buffer), ([(0, normal(0))], buffer[:0])],
        "select": [*((given, buffer, k, 0.3) for k in (0, 1, K, N)), ([], buffer[:0], 3)],
        "select_above": [(given, buffer, 2.5), (given, buffer, 0.0), ([], buffer[:0], 1.0)],
        "take": [(given, buffer, INDICES), (given, buffer, None), (given, buffer, NOTHING)],
        "accumulate_moments": [(given, buffer, 0.5)],
        "count_reaching": [(given, buffer, thresholds)],
        "tail": [(given, buffer, 1.5)],
        "square_norm": [(given,), ([],)],
        "largest": [(given,), ([],)],
        "block_scores": [(given, buffer, 64), (given, buffer, 5000)],
        "sample": [(given, buffer, 0.5, 3, 17)],
        "gathered": [(buffer, INDICES, -1.0), (buffer[:0], NOTHING, 1.0)],
        "add": [(*vector(dtype), buffer), (None, buffer, buffer), (NOTHING, buffer[:0], buffer)],
        "scatter": [(*vector(dtype), given, 0.25), (None, buffer, given, 2.0)],
        "count_magnitudes": [(buffer, 0, buffer.itemsize * 8 - 9, 8)],
    }


def on_vectors(dtype: Any) -> dict[str, list[Case]]:
    """Arguments of the kernels that take sparse vectors."""
    several = [vector(dtype), vector(dtype, OTHERS, 5), vector(dtype, INDICES[:1], 6), vector(dtype, NOTHING)]
    return {
        "cut": [(*vector(dtype), k) for k in (0, 1, INDICES.size // 3, INDICES.size)],
        "exclude": [(*vector(dtype), OTHERS), (*vector(dtype), NOTHING)],
        "reaching": [(*vector(dtype), 1.0), (*vector(dtype, NOTHING), 1.0)],
        "shifted": [(INDICES, -3), (NOTHING, 5)],
        "places": [(INDICES, OnHost(np.array([0, 3, N], np.int32))), (NOTHING, OnHost(np.array([5], np.int32)))],
        "merge_sum": [(several, N), (several[:1], N)],
        "encode_indices": [(INDICES,), (INDICES[:1],)],
        "decode_indices": [(CODED, INDICES.size, int(INDICES[0]), BITS, N), (CODED[:0], 1, 5, 0, N)],
        "check_ascending": [([INDICES, NOTHING, OTHERS], N)],
    }


def on_values(dtype: Any) -> dict[str, list[Case]]:
    """Arguments of the kernels that convert values, and of the sketch."""
    values = normal(N, seed=1).astype(dtype)
    bfloat16 = reference.narrow(values, "bfloat16")
    sketches = [(reference.sketch_length(N, 0.4, rows), rows) for rows in (1, 3, 5)]
    codes = [(bits, reference.quantize(values[:UNITS], bits, 7)) for bits in (4, 8, 16)]
    log = [(4, 0x40A00000, 21), (8, 0x42F00000, 20)]
    return {
        "sketch_length": [(N, 0.4, 3)],
        "sketch_update": [(normal(n, 9).astype(dtype), values, INDICES, rows, 7, 0.5) for n, rows in sketches],
        "sketch_query": [(normal(n, 9).astype(dtype), values, rows, 7) for n, rows in sketches],
        "quantize": [(values[:UNITS], bits, 7) for bits in (4, 8, 16)],
        "dequantize": [(*coded, values[:UNITS], bits, 0.5) for bits, coded in codes],
        "key_range": [(values,), (values[:0],)],
        "round_levels": [(values, *levels) for levels in log],
        "encode_levels": [(reference.round_levels(values, *levels)[0], *levels) for levels in log],
        "decode_levels": [(reference.encode_levels(values, *levels), N, *levels, np.dtype(dtype)) for levels in log],
        "narrow": [(values, "bfloat16"), (values[:7], "float16"), (values[:0], "float16")],
        "widen": [(bfloat16, "bfloat16", np.dtype(dtype))],
        "round_values": [(values, "bfloat16"), (values, "float16")],
    }


def cases(dtype: Any) -> dict[str, list[Case]]:
    return {**on_buckets(dtype), **on_vectors(dtype), **on_values(dtype)}


NAMES = [name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def pools() -> Iterator[None]:
    if os.environ.get("HOROVOD_SPARSE_TEST_NO_POOLS") != "1" or emulated():
        yield
        return
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(None)
    yield
    cupy.cuda.set_allocator(before)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel(name: str, dtype: Any) -> None:
    for given in cases(dtype)[name]:
        assert_parity(name, *given, on=DEVICE, waiting=None)


@pytest.mark.parametrize("momentum", [(0.9, 0.3, 0.0, 1.0), (0.9, 0.3, 4.0, 0.6)])
@pytest.mark.parametrize("name", ["accumulate", "select", "select_above"])
def test_every_kernel_with_a_velocity(name: str, momentum: tuple[float, ...]) -> None:
    given: Callable[[], Case] = lambda: on_buckets(np.float32)[name][-2]  # noqa: E731
    for clear in (False, True):
        velocity = Velocity(normal(N, seed=3), *momentum)
        assert_parity(name, *given(), on=DEVICE, waiting=None, velocity=velocity, clear=clear, source=normal(N, seed=4))

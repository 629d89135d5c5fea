"""Tests that need a real device: streams, memory, and no synchronization. Not collected without one."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
import torch
from devices import on_device, to_host
from inputs import assert_same_bits, normal
from torch.utils.dlpack import from_dlpack

from horovod_sparse import metrics
from horovod_sparse.engine.device import Device, device_of
from horovod_sparse.kernels import cuda

N, K = 300_000, 3000
GPU = torch.device("cuda", 0)


@pytest.fixture
def device() -> Device:
    return device_of(GPU)


@pytest.fixture
def work(device: Device) -> Iterator[None]:
    with device.work():
        yield


WITHOUT_WAITING = ["accumulate", "select", "cut", "take", "scatter", "add", "sample", "block_scores", "sketch_update"]
WITHOUT_WAITING += ["sketch_query", "quantize"]


def calls(gradient: Any, buffer: Any, half: Any) -> dict[str, Callable[[], Any]]:
    """Return calls that must not wait for the device."""
    indices, values = cupy.arange(K, dtype=np.int32) * 7, cupy.ones(K, np.float32)
    sketch = cupy.zeros(cuda.sketch_length(N, 0.4, 3), np.float32)
    return {
        "accumulate": lambda: cuda.accumulate([(0, gradient)], buffer, 0.5),
        "select": lambda: cuda.select([(0, gradient)], buffer, K),
        "cut": lambda: cuda.cut(indices, values, K // 2),
        "take": lambda: cuda.take([(0, gradient)], buffer, indices),
        "scatter": lambda: cuda.scatter(indices, values, [(0, gradient), (N, half)], 0.25),
        "add": lambda: cuda.add(indices, values, buffer),
        "sample": lambda: cuda.sample([(0, gradient)], buffer, 1.0, 0, 100),
        "block_scores": lambda: cuda.block_scores([(0, gradient)], buffer, 64),
        "sketch_update": lambda: cuda.sketch_update(sketch, buffer, indices, 3, 7, 1.0),
        "sketch_query": lambda: cuda.sketch_query(sketch, buffer, 3, 7),
        "quantize": lambda: cuda.quantize(buffer, 4, 7),
    }


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_nothing_waits_for_the_device(name: str, work: None) -> None:
    """A call that waits cannot be captured in a graph."""
    call = calls(on_device(normal(N)), on_device(normal(N, seed=1)), cupy.empty(99, np.float16))[name]
    for _ in range(2):  # compiles, and leaves free memory behind
        call()
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    result = call()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    del result


def test_a_captured_selection_is_right(work: None) -> None:
    gradient, buffer = on_device(normal(N)), on_device(normal(N, seed=1))
    cuda.select([(0, gradient)], buffer, K)
    buffer.set(normal(N, seed=1))
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    indices, values = cuda.select([(0, gradient)], buffer, K)
    graph = stream.end_capture()
    graph.launch(stream)
    expected = normal(N, seed=1)
    wanted = reference.select([(0, normal(N))], expected, K)
    assert_same_bits(to_host(indices), wanted[0])
    assert_same_bits(to_host(values), wanted[1])
    assert_same_bits(to_host(buffer), expected)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_memory_in_addition_to_the_residual(density: float, work: None) -> None:
    n = 25_600_000
    gradient, buffer = cupy.ones(n, np.float32), cupy.zeros(n, np.float32)
    torch.cuda.empty_cache()  # a block of another test's, a little larger than needed, would count as a whole
    cuda.select([(0, gradient)], buffer, round(density * n))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    cuda.select([(0, gradient)], buffer, round(density * n))
    assert torch.cuda.max_memory_allocated(GPU) - before < 0.05 * buffer.nbytes


def test_cupy_takes_torchs_memory(device: Device) -> None:
    before = torch.cuda.memory_allocated(GPU)
    with device.work():
        array = cupy.empty(10_000_000, np.uint8)
        assert torch.cuda.memory_allocated(GPU) >= before + array.nbytes
        del array
    assert torch.cuda.memory_allocated(GPU) == before


def test_memory_returns_from_other_threads_and_from_cycles(device: Device) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated(GPU)
    with device.work():
        arrays = [cupy.empty(1 << 20, np.uint8) for _ in range(4)]
        cycle: list[Any] = [cupy.empty(1 << 20, np.uint8)]
        cycle.append(cycle)
    assert torch.cuda.memory_allocated(GPU) >= before + (5 << 20)
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    del cycle
    gc.collect()
    assert torch.cuda.memory_allocated(GPU) == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside products"])
def test_many_selections_have_the_same_bits(device: Device, busy: bool) -> None:
    """Blocks wait for each other's counts: a missing fence, or blocks that cannot all run, would show up here."""
    n, rounds = 25_600_000, 100 if busy else 200
    generator = torch.Generator(GPU).manual_seed(0)
    gradient, buffer = (torch.randn(n, generator=generator, device=GPU) for _ in range(2))
    factor = torch.randn(4096, 4096, generator=generator, device=GPU)
    found: dict[int, torch.Tensor] = {}
    for round_ in range(rounds):
        k = n // 100 + 977 * (round_ % 3)
        ours = buffer.clone()
        ready = device.mark(device.stream())
        if busy:  # torch's stream goes on, while the private one waits for what was marked only
            factor = (factor @ factor).clamp(-1, 1)
        with device.work(after=[ready]):
            indices, values = cuda.select([(0, device.array_of(gradient))], device.array_of(ours), k)
            sums = [from_dlpack(one.view(np.int32)).sum(dtype=torch.int64) for one in (indices, values)]
            sums.append(ours.view(torch.int32).sum(dtype=torch.int64))
            digest = torch.stack(sums)
        device.follow()
        if k in found:
            assert torch.equal(digest, found[k]), round_
        found.setdefault(k, digest)
    assert len(found) == 3


def test_host_time_of_an_operation(device: Device, record_property: Callable[[str, object], None]) -> None:
    """Microseconds, printed with ``-s`` and kept in a report of JUnit; a step of 150 tensors takes each 150 times."""
    tensor, count = torch.zeros(1000, device=GPU), 1000
    with device.work():
        array = device.array_of(tensor)
        operations: dict[str, Callable[[], Any]] = {
            "array_of": lambda: device.array_of(tensor),
            "empty": lambda: cupy.empty(1000, np.float32),
            "launch": lambda: cuda.accumulate([(0, array)], array),
            "mark": lambda: device.mark(device.stream()),
        }
        for name, run in operations.items():
            run()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            microseconds = 1e6 * (time.perf_counter() - begin) / count
            torch.cuda.synchronize()
            record_property(name, microseconds)
            print(f"{name}: {microseconds:.1f} us")
            assert microseconds < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_arrays_share_the_tensors_memory(device: Device, dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=torch.float32).to(dtype).to(GPU).view(3, 4)
    buffer = torch.zeros(12, dtype=torch.float32, device=GPU)
    with device.work(after=[device.mark(device.stream())]):
        cuda.accumulate([(0, device.array_of(tensor))], device.array_of(buffer))
    device.follow()
    assert torch.equal(buffer.view(3, 4), tensor.float())


def test_work_comes_after_what_was_marked_and_before_what_follows(device: Device) -> None:
    """A long product on torch's stream, a concurrent sum, a copy on torch's stream: in this order."""
    a = torch.full((4096, 4096), 1 / 4096, device=GPU)
    for _ in range(3):
        total = torch.zeros(4096 * 4096, device=GPU)
        product = a
        for _ in range(20):
            product = product @ a
        ready = device.mark(device.stream())
        with device.work(after=[ready]):
            cuda.accumulate([(0, device.array_of(product))], device.array_of(total))
        device.follow()
        assert torch.equal(total.clone().view(4096, 4096), product)


def test_spans_are_as_long_as_the_device_works_and_wait_for_nothing(device: Device) -> None:
    cycles = 200_000_000  # a tenth of a second
    torch.cuda._sleep(1000)
    metrics.clear()
    metrics.enable(device=torch.cuda)
    begin = time.perf_counter()
    with metrics.span("backward"):
        torch.cuda._sleep(cycles)
    with device.work(), metrics.span("select"):
        torch.cuda._sleep(cycles // 2)
    launched = time.perf_counter() - begin
    backward, select = metrics.spans()
    done = time.perf_counter() - begin
    metrics.enable(False)
    metrics.clear()
    assert launched * 1e9 < 0.2 * backward.duration
    assert select.duration == pytest.approx(backward.duration / 2, rel=0.3)
    assert max(one.start + one.duration for one in (backward, select)) - backward.start <= done * 1e9
    assert abs(backward.start / 1e9 - time.time()) < 60

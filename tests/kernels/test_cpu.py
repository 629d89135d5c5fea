"""The CPU kernels in a process: SIMD levels, threads and the GIL; and the choice between the CPU and the device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
import pytest
from backends import CPU, assert_parity
from inputs import Array, normal

from horovod_sparse.kernels import Kernels, cpu, cuda, kernels_for


def test_kernels_for() -> None:
    assert kernels_for(np.zeros(3)) is cpu
    assert kernels_for(cupy.empty(0, np.float32)) is cuda
    with pytest.raises(TypeError, match=r"builtins\.list"):
        kernels_for([1.0])


def test_both_devices_have_all_kernels() -> None:
    kernels = {name for name in vars(Kernels) if name[0] != "_"}
    assert kernels <= set(vars(cpu))
    assert kernels == set(cuda.__all__)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'sse9' is not supported; this machine has: .*portable"):
        cpu.use_simd("sse9")


def import_with(level: str) -> subprocess.CompletedProcess[str]:
    script = "from horovod_sparse.kernels import cpu; print(cpu.simd_level())"
    environment = {**os.environ, "HOROVOD_SPARSE_SIMD": level}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)


def test_environment_sets_the_level() -> None:
    for backend in CPU:
        assert import_with(str(backend.level)).stdout == f"{backend.level}\n"
    assert import_with("").stdout == f"{CPU[0].level}\n"
    assert "SIMD level 'mmx' is not supported" in import_with("mmx").stderr


# Each takes some ten milliseconds or more.
LONG_CALLS: dict[str, Callable[[Array, Array], object]] = {
    "accumulate": lambda values, _: cpu.accumulate([(0, values)], np.zeros_like(values), 0.5),
    "select": lambda values, _: cpu.select([(0, values)], np.zeros_like(values), len(values) // 2),
    "select_above": lambda values, _: cpu.select_above([(0, values)], np.zeros_like(values), 0.5),
    "merge_sum": lambda values, indices: cpu.merge_sum([(indices, values), (indices, values)], len(values)),
    "exclude": lambda values, indices: cpu.exclude(indices, values, indices),
    "count_magnitudes": lambda values, _: cpu.count_magnitudes(values, 0, 20, 11),
    "accumulate_moments": lambda values, _: cpu.accumulate_moments([(0, values)], np.zeros_like(values), 0.5),
    "count_reaching": lambda values, _: cpu.count_reaching([(0, values)], np.zeros(len(values)), np.ones(16)),
    "tail": lambda values, _: cpu.tail([(0, values)], values, 0.5),
    "square_norm": lambda values, _: cpu.square_norm([(i * len(values), values) for i in range(20)]),
    "sample": lambda values, _: cpu.sample([(0, values)], np.zeros_like(values), 0.5, 0, 1),
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_gil_is_released(name: str) -> None:
    """Another thread runs during the kernel."""
    values, indices = normal(8_000_000), np.arange(8_000_000, dtype=np.int32)
    ticks = [time.perf_counter()]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    def ticks_inside() -> int:
        begin = time.perf_counter()
        LONG_CALLS[name](values, indices)
        end = time.perf_counter()
        return sum(begin < t < end for t in ticks)

    thread = threading.Thread(target=tick)
    thread.start()
    # One could fall before a kernel that holds the lock, and one behind it. On a busy machine, few fall anywhere.
    until, most = time.perf_counter() + 10, 0
    while most <= 2 and time.perf_counter() < until:
        most = ticks_inside()
    stop.set()
    thread.join()
    assert most > 2


def test_calls_at_the_same_time() -> None:
    """Each call has its own workspace."""

    def work(seed: int) -> None:
        for _ in range(5):
            bucket = [(0, normal(200_000, seed))], normal(200_000, seed + 1)
            assert_parity("select", *bucket, 2000 * seed, 0.5, threads=[2], on=CPU[:1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))

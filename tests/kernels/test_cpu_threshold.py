"""select_above and count_magnitudes against the NumPy reference: the same bits, whatever the level and the threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    FORMATS,
    LAYOUTS,
    REALS,
    SCALES,
    SHAPES,
    Array,
    arrays,
    assert_same_bits,
    buckets,
    layered,
    normal,
    read_only,
)

from horovod_sparse.kernels import cpu

THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 1.5, 2.0, 3.0, 65504.0, 3.4e38, 1e300, np.inf]


def assert_above(
    segments: list[tuple[int, Array]], buffer: Array, threshold: float, scale: float = 1.0, threads: int = 1
) -> int:
    """Parity; returns how many elements left."""
    ours, expected = buffer.copy(), buffer.copy()
    indices, values = cpu.select_above(segments, ours, threshold, scale, threads)
    expected_indices, expected_values = reference.select_above(segments, expected, threshold, scale)
    assert_same_bits(indices, expected_indices)
    assert_same_bits(values, expected_values)
    assert_same_bits(ours, expected)
    return len(indices)


# --- select_above --------------------------------------------------------------------------------------------------


@given(
    bucket=buckets(),
    threshold=st.sampled_from(THRESHOLDS) | st.floats(0, 10),
    scale=SCALES,
    threads=st.integers(1, 3),
)
def test_small_buckets(level: str, bucket: Any, threshold: float, scale: float, threads: int) -> None:
    assert_above(*bucket, threshold, scale, threads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_distributions(level: str, shape: Callable[[int], Array], dtype: Any, share: float) -> None:
    """Every threshold is a magnitude that occurs, so that it is met exactly; held positions split the bucket."""
    n = 100_003
    buffer = shape(n).astype(dtype)
    segments = [(0, normal(n // 2, seed=1) * buffer[: n // 2].astype(np.float32)), (n // 2 + 11, buffer[n // 2 + 11 :])]
    acc = buffer.copy()
    reference.accumulate(segments, acc)
    numbers = np.sort(np.abs(acc[~np.isnan(acc)]))[::-1]
    assert assert_above(segments, buffer, numbers[int(share * (len(numbers) - 1))], threads=2) > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.5, 3.0, 30.0])
def test_millions(level: str, threshold: float, threads: int) -> None:
    n = 3_000_017
    assert_above([(0, layered(n))], normal(n, seed=1), threshold, 0.7, threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_grows_during_a_call(threads: int) -> None:
    """More entries than are kept from call to call, so that their memory starts small and grows."""
    n = 9_000_000
    gradient, buffer = normal(n), np.zeros(n, np.float32)
    assert_above([(0, gradient)], buffer, 0.0, threads=threads)
    assert_above([(0, gradient)], buffer, 0.1, threads=threads)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formats(level: str, format_: Any, layout: Callable[[Array], Array]) -> None:
    parts = np.split(normal(60_000).astype(format_), [10, 20_011, 20_012])
    starts = np.cumsum([0, *map(len, parts[:-1])]) + 3 * np.arange(4)
    segments = [(int(start), layout(part)) for start, part in zip(starts, parts, strict=True)]
    assert_above(segments, normal(60_020, seed=1), 2.5, 0.9, threads=2)


def test_many_small_tensors(level: str) -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]
    assert_above(segments, normal(60_000), 2.0, threads=3)


def test_zero_takes_all_but_the_held(level: str) -> None:
    buffer = np.array([0.0, -0.0, 1e-45, np.nan, np.inf, 7.0, 8.0], np.float32)
    indices, values = cpu.select_above([(0, np.zeros(5, np.float32))], buffer, 0.0)
    np.testing.assert_array_equal(indices, np.arange(5))
    np.testing.assert_array_equal(values, np.array([0, 0, 1e-45, np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(buffer, [0, 0, 0, 0, 0, 7, 8])


@pytest.mark.parametrize("threshold", [1.0, 3.4e38, np.inf, 1e300])
def test_nan_leaves_whatever_the_threshold(level: str, threshold: float) -> None:
    buffer = np.array([0.5, np.nan, -np.nan, -np.inf] * 100, np.float32)
    indices, _ = cpu.select_above([(0, np.zeros(400, np.float32))], buffer, threshold)
    np.testing.assert_array_equal(indices % 4, np.tile([1, 2, 3], 100))


def test_threshold_is_rounded_to_the_buffer(level: str) -> None:
    """0.7 is above float32's nearest number to it, which reaches it nevertheless."""
    nearest = np.full(100, 0.7, np.float32)
    assert float(nearest[0]) < 0.7
    assert assert_above([(0, nearest)], np.zeros(100, np.float32), 0.7) == 100
    assert assert_above([(0, nearest)], np.zeros(100, np.float64), 0.7) == 0


OUT_OF_MEMORY = """
import resource
from pathlib import Path
import numpy as np
from horovod_sparse.kernels import cpu

n, threads = 4_000_000, {threads}
gradient, buffer = np.ones(n, np.float32), np.empty(n, np.float32)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
unlimited = resource.RLIM_INFINITY
outcomes = []
for room in range(20 * threads - 20, 160, 2):  # a thread needs some memory to start
    buffer[:] = 1
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), unlimited))
    try:
        indices, values = cpu.select_above([(0, gradient)], buffer, 2.0, 1.0, threads)
    except MemoryError:
        outcomes.append("failed")
        resource.setrlimit(resource.RLIMIT_AS, (unlimited, unlimited))
        assert (buffer == 2).all(), "nothing leaves"
    else:
        outcomes.append("done")
        resource.setrlimit(resource.RLIMIT_AS, (unlimited, unlimited))
        assert len(indices) == n and (values == 2).all() and not buffer.any()
        del indices, values
print(*sorted(set(outcomes)))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_leaves_when_memory_runs_out(threads: int) -> None:
    """Whether the scratch memory cannot grow or the result has no room."""
    command = [sys.executable, "-c", OUT_OF_MEMORY.format(threads=threads)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout == "done failed\n", run.stderr


# --- count_magnitudes ----------------------------------------------------------------------------------------------

WIDTHS = {np.dtype(np.float32): 31, np.dtype(np.float64): 63}


@st.composite
def digits(draw: st.DrawFn) -> tuple[Array, int, int, int]:
    """Values and a digit of them; most prefixes are those of a value."""
    dtype = draw(st.sampled_from(REALS))
    values = draw(arrays(dtype, draw(st.integers(0, 200))))
    bits = draw(st.integers(1, 16))
    shift = draw(st.integers(0, WIDTHS[dtype] - bits))
    prefixes = st.integers(0, 2 ** WIDTHS[dtype] - 1)
    if len(values):
        prefixes = st.sampled_from(reference.magnitude(values)).map(int) | prefixes
    return values, draw(prefixes), shift, bits


@given(case=digits())
def test_count_magnitudes(case: Any) -> None:
    ours, expected = cpu.count_magnitudes(*case), reference.count_magnitudes(*case)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_counts_of_many_ranks_lead_to_the_kth_magnitude(shape: Callable[[int], Array], dtype: Any) -> None:
    """Radix selection with summed counts, which is what the function is for."""
    parts = np.array_split(shape(50_000).astype(dtype), [10, 10, 30_000])
    ordered = np.sort(reference.magnitude(np.concatenate(parts)))[::-1]
    for k in (1, 500, 50_000):
        shift, prefix, left = WIDTHS[np.dtype(dtype)], 0, k
        while shift > 0:
            bits = min(11, shift)
            shift -= bits
            counts = sum(cpu.count_magnitudes(part, prefix, shift, bits) for part in parts)
            reached = np.cumsum(counts[::-1])[::-1]
            digit = int(np.flatnonzero(reached >= left)[-1])
            left -= int(reached[digit] - counts[digit])
            prefix |= digit << shift
        assert prefix == ordered[k - 1]


# --- refused input -------------------------------------------------------------------------------------------------

F32 = np.zeros(8, np.float32)
F64 = np.zeros(8)
HUGE = np.broadcast_to(np.float32(0), 2**31)  # one element, repeated: no 8 GiB

REFUSED = {
    "negative": (lambda: cpu.select_above([], F32, -1.5), "threshold must be 0 or more, not -1.5"),
    "NaN": (lambda: cpu.select_above([], F32, np.nan), "threshold must be 0 or more, not nan"),
    "scale": (lambda: cpu.select_above([], F32, 1.0, np.inf), "scale must be finite, not inf"),
    "threads": (lambda: cpu.select_above([], F32, 1.0, 1.0, 0), "threads must be 1 .. 1024, not 0"),
    "read-only": (lambda: cpu.select_above([], read_only(F32), 1.0), "buffer: is read-only"),
    "strided": (lambda: cpu.select_above([], F32[::2], 1.0), "buffer: must be contiguous"),
    "float16": (lambda: cpu.select_above([], F32.astype(np.float16), 1.0), "buffer: dtype float16"),
    "overlap": (lambda: cpu.select_above([(0, F32[:4]), (3, F32[:4])], F32, 0), "segment 1: starts at 3, before 4"),
    "2**31": (lambda: cpu.select_above([(0, HUGE)], F32, 1.0), "segment 0: 2147483648 elements"),
    "no bits": (lambda: cpu.count_magnitudes(F32, 0, 0, 0), "bits must be 1 .. 16, not 0"),
    "bits": (lambda: cpu.count_magnitudes(F32, 0, 0, 17), "bits must be 1 .. 16, not 17"),
    "shift": (lambda: cpu.count_magnitudes(F32, 0, 21, 11), "shift must be 0 .. 20 for 11 of 31 bits, not 21"),
    "shift of 64": (lambda: cpu.count_magnitudes(F64, 0, 48, 16), "shift must be 0 .. 47 for 16 of 63 bits, not 48"),
    "negative shift": (lambda: cpu.count_magnitudes(F32, 0, -1, 11), "shift must be 0 .. 20 .* not -1"),
    "prefix": (lambda: cpu.count_magnitudes(F32, 2**31, 0, 1), "prefix must have at most 31 bits, but is 2147483648"),
    "negative prefix": (lambda: cpu.count_magnitudes(F64, -1, 0, 1), "prefix must have at most 63 bits, but is -1"),
    "integers": (lambda: cpu.count_magnitudes(np.arange(3), 0, 0, 1), "values: dtype int64 is not float32"),
    "halves": (lambda: cpu.count_magnitudes(np.ones(3, np.float16), 0, 0, 1), "values: dtype float16 is neither"),
    "strided values": (lambda: cpu.count_magnitudes(F32[::2], 0, 0, 1), "values: must be contiguous"),
    "values of 2**31": (lambda: cpu.count_magnitudes(HUGE, 0, 0, 1), "values: 2147483648 elements"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert not F32.any(), "refused before anything is written"


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="buffer: expected a NumPy array, not <class 'list'>"):
        cpu.select_above([], [1.0], 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values: expected a NumPy array, not <class 'list'>"):
        cpu.count_magnitudes([1.0], 0, 0, 1)  # type: ignore[arg-type]

"""The CPU kernels against the NumPy reference: the same bits, for every SIMD level and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import (
    BFLOAT16,
    FORMATS,
    LAYOUTS,
    REALS,
    SCALES,
    SHAPES,
    Array,
    arrays,
    as_given,
    assert_same_bits,
    buckets,
    every_third,
    gradients,
    layered,
    normal,
    odd_address,
    read_only,
    reversed_,
    sparse_vectors,
    supported_levels,
)

from horovod_sparse.kernels import _cpu, cpu, kernels_for


def assert_select(segments: list[tuple[int, Array]], buffer: Array, k: int, scale: float, threads: int) -> None:
    ours, expected = buffer.copy(), buffer.copy()
    indices, values = cpu.select(segments, ours, k, scale, threads)
    expected_indices, expected_values = reference.select(segments, expected, k, scale)
    assert_same_bits(indices, expected_indices)
    assert_same_bits(values, expected_values)
    assert_same_bits(ours, expected)


# --- select: small inputs ------------------------------------------------------------------------------------------


@given(bucket=buckets(), k=st.integers(0, 320), scale=SCALES, threads=st.integers(1, 3))
def test_select_small(level: str, bucket: Any, k: int, scale: float, threads: int) -> None:
    assert_select(*bucket, k, scale, threads)


@given(bucket=buckets(), scale=SCALES, threads=st.integers(1, 3))
def test_select_everything(level: str, bucket: Any, scale: float, threads: int) -> None:
    assert_select(*bucket, sum(len(gradient) for _, gradient in bucket[0]), scale, threads)


def forced(bucket: Any, k: int, scale: float, threads: int, plan: tuple[float, float, float, int]) -> int:
    """Parity with given thresholds; returns how often the kernel had to fall back."""
    before = _cpu.fallbacks()
    _cpu.force(plan)
    try:
        assert_select(*bucket, k, scale, threads)
    finally:
        _cpu.force(None)
    return _cpu.fallbacks() - before


LIMITS = st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.5, 2.0, 3.0, 1e30, np.inf, np.nan])


@settings(max_examples=300)
@given(
    bucket=buckets(),
    share=st.floats(0, 1),
    scale=SCALES,
    threads=st.integers(1, 3),
    limits=st.tuples(LIMITS, LIMITS),
    high=LIMITS,
    capacity=st.sampled_from([0, 3, 20, 1000]),
)
def test_select_whatever_the_sample_says(
    level: str, bucket: Any, share: float, scale: float, threads: int, limits: Any, high: float, capacity: int
) -> None:
    low, guess = np.sort(limits)
    k = round(share * sum(len(gradient) for _, gradient in bucket[0]))
    forced(bucket, k, scale, threads, (low, guess, high, capacity))


# --- select: large inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.3])
def test_select_distributions(level: str, shape: Callable[[int], Array], dtype: Any, density: float) -> None:
    n = 100_003
    buffer = shape(n).astype(dtype)
    segments = [(0, normal(n // 2, seed=1) * buffer[: n // 2].astype(np.float32)), (n // 2 + 11, buffer[n // 2 + 11 :])]
    assert_select(segments, buffer, round(density * n), 1.0, threads=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
def test_select_millions(level: str, density: float, threads: int) -> None:
    n = 3_000_017
    before = _cpu.fallbacks()
    assert_select([(0, layered(n))], normal(n, seed=1), round(density * n), 0.7, threads)
    assert _cpu.fallbacks() == before, "the sampled thresholds should have been good enough"


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_select_formats(level: str, format_: Any, layout: Callable[[Array], Array]) -> None:
    parts = np.split(normal(60_000).astype(format_), [10, 20_011, 20_012])
    starts = np.cumsum([0, *map(len, parts[:-1])]) + 3 * np.arange(4)
    segments = [(int(start), layout(part)) for start, part in zip(starts, parts, strict=True)]
    assert_select(segments, normal(60_020, seed=1), 600, 0.9, threads=2)


def test_select_many_small_tensors(level: str) -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]
    assert_select(segments, normal(60_000), 500, 1.0, threads=3)


# --- select: a sample that misleads --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sampled", [0.0, 100.0, np.nan])
def test_select_unrepresentative_sample(level: str, sampled: float, threads: int) -> None:
    """Thresholds far too low (too many candidates) or too high (fewer than k, all of them zeroed in the sweep)."""
    n = 1_000_000
    gradient = normal(n)
    positions = _cpu.sample_positions(n)
    gradient[positions] = sampled
    before = _cpu.fallbacks()
    assert_select([(0, gradient)], np.zeros(n, np.float32), len(positions) + 50, 1.0, threads)
    assert _cpu.fallbacks() == before + 1


@pytest.mark.parametrize("active", [512, 513, 16_384, 10**6, 25 * 10**6, 2**31 - 1])
def test_sample_is_stratified(active: int) -> None:
    clusters = _cpu.sample_positions(active).reshape(-1, 16)
    strata = np.arange(len(clusters) + 1) * (active / len(clusters))
    assert np.all(np.diff(clusters) == 1), "a cluster is adjacent"
    assert np.all(clusters[:, 0] > strata[:-1] - 16)
    assert np.all(clusters[:, 0] < strata[1:])
    assert clusters[0, 0] >= 0
    assert clusters[-1, -1] < active


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [4, 8, 64, 1000])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01])
def test_sample_expects_neighbours_to_be_alike(width: int, density: float, threads: int) -> None:
    n = 1_000_003
    rows = np.exp(2 * np.random.default_rng(0).standard_normal(n // width + 1, dtype=np.float32))
    before = _cpu.fallbacks()
    assert_select([(0, normal(n) * np.repeat(rows, width)[:n])], normal(n, seed=1), round(density * n), 0.9, threads)
    assert _cpu.fallbacks() == before


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("plan", "fallbacks"),
    [
        pytest.param((2.5, 2.6, 2.7, 10**5), 0, id="good"),
        pytest.param((1.0, 1.0, 1.0, 10**5), 0, id="all three too low: entries come back"),
        pytest.param((1.0, 5.0, 5.0, 10**5), 0, id="guess too high: entries leave late"),
        pytest.param((3.5, 3.5, 3.5, 10**5), 1, id="too few candidates, all zeroed"),
        pytest.param((0.1, 1.0, 2.0, 5000), 1, id="overflow after thousands were zeroed"),
        pytest.param((0.0, 0.0, 0.0, 0), 1, id="overflow at once"),
    ],
)
def test_select_wrong_thresholds(level: str, plan: Any, fallbacks: int, threads: int) -> None:
    bucket = [(0, normal(80_000))], np.zeros(80_000, np.float32)
    assert forced(bucket, 790, 1.0, threads, plan) == fallbacks


@pytest.mark.parametrize("k", [99, 100, 101])
def test_select_as_many_as_reach_the_bracket(level: str, k: int) -> None:
    """Exactly k candidates reach the high end: none of those between the ends leaves."""
    gradient = np.random.default_rng(0).permutation(1000).astype(np.float32)
    assert forced(([(0, gradient)], np.zeros(1000, np.float32)), k, 1.0, 1, (800.0, 850.0, 900.0, 10**4)) == 0


# --- accumulate and all_finite -------------------------------------------------------------------------------------


@given(bucket=buckets(), scale=SCALES, threads=st.integers(1, 3))
def test_accumulate(level: str, bucket: Any, scale: float, threads: int) -> None:
    segments, buffer = bucket
    ours, expected = buffer.copy(), buffer.copy()
    cpu.accumulate(segments, ours, scale, threads)
    reference.accumulate(segments, expected, scale)
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("scale", [1.0, 0.0, 1 / 3])
def test_accumulate_rounds_product_and_sum_separately(level: str, scale: float) -> None:
    ours, expected = normal(100_001), normal(100_001)
    cpu.accumulate([(0, normal(100_001, seed=1))], ours, scale)
    reference.accumulate([(0, normal(100_001, seed=1))], expected, scale)
    assert_same_bits(ours, expected)


def test_scale_zero_ignores_nan(level: str) -> None:
    buffer = np.full(100, np.nan, np.float32)
    cpu.accumulate([(0, np.ones(60, np.float32))], buffer, scale=0.0)
    np.testing.assert_array_equal(buffer, np.arange(100) < 60)


@pytest.mark.parametrize("format_", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_every_16_bit_number_widens(level: str, format_: Any, real: Any) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(format_)
    buffer = np.empty(2**16, real)
    cpu.accumulate([(0, every)], buffer, scale=0.0)
    assert_same_bits(buffer, real.type(0) + every.astype(real))


@given(size=st.integers(0, 100).flatmap(gradients))
@example(size=[(3, np.array([np.nan]))])
def test_all_finite(level: str, size: Any) -> None:
    assert cpu.all_finite(size) == reference.all_finite(size)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", [as_given, every_third, reversed_, odd_address])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_finds_one(level: str, format_: Any, layout: Callable[[Array], Array], bad: float) -> None:
    x = normal(10_000).astype(format_)
    x[:2] = [ml_dtypes.finfo(format_).max, ml_dtypes.finfo(format_).tiny]
    assert cpu.all_finite([(0, layout(x)), (10_000, x)])
    for position in (0, 4095, 4096, 9_999):
        y = x.copy()
        y[position] = bad
        assert not cpu.all_finite([(0, x), (10_000, layout(y))])


# --- sparse vectors ------------------------------------------------------------------------------------------------


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Array | None, Array, list[tuple[int, Array]]]:
    size = draw(st.integers(0, 120))
    dtype = draw(st.sampled_from(REALS))
    outputs = []
    for start, gradient in draw(gradients(size)):
        layout = draw(st.sampled_from([as_given, odd_address]))
        outputs.append((start, layout(np.full(len(gradient), 9, gradient.dtype))))
    if draw(st.booleans()):
        return None, draw(arrays(dtype, size)), outputs
    return (*draw(sparse_vectors(size, dtype)), outputs)


@given(case=scatters(), scale=SCALES)
def test_scatter(level: str, case: Any, scale: float) -> None:
    indices, values, outputs = case
    expected = [(start, output.copy()) for start, output in outputs]
    cpu.scatter(indices, values, outputs, scale)
    reference.scatter(indices, values, expected, scale)
    for (_, ours), (_, theirs) in zip(outputs, expected, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("format_", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_scatter_rounds_to_nearest_even(format_: Any, real: Any) -> None:
    """Every 16-bit number, the middles between neighbours, what lies just beside the middles, and random bits."""
    every = np.arange(2**16, dtype=np.uint16).view(format_).astype(np.float32)
    middles = (every[:-1] + every[1:]) / 2
    beside = [np.nextafter(middles, np.float32(limit)) for limit in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([every, middles, *beside, random]).astype(real)
    output = np.ones(len(values), format_)
    cpu.scatter(None, values, [(0, output)])
    assert_same_bits(output, values.astype(np.float32).astype(format_))


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_scatter_large(format_: Any) -> None:
    indices = np.flatnonzero(normal(100_000) > 1).astype(np.int32)
    values = normal(len(indices), seed=1)
    outputs, expected = ([(5, np.ones(60_000, format_)), (60_010, np.ones(39_000, format_))] for _ in range(2))
    cpu.scatter(indices, values, outputs, 0.25)
    reference.scatter(indices, values, expected, 0.25)
    for (_, ours), (_, theirs) in zip(outputs, expected, strict=True):
        assert_same_bits(ours, theirs)


@given(size=st.integers(0, 100), dtype=st.sampled_from(REALS), data=st.data())
def test_add(level: str, size: int, dtype: Any, data: st.DataObject) -> None:
    buffer = data.draw(arrays(dtype, size))
    indices, values = data.draw(sparse_vectors(size, dtype))
    expected = buffer.copy()
    cpu.add(indices, values, buffer)
    reference.add(indices, values, expected)
    cpu.add(None, buffer.copy(), buffer)
    reference.add(None, expected.copy(), expected)
    assert_same_bits(buffer, expected)


@given(bucket=buckets(), data=st.data(), everything=st.booleans())
def test_take(bucket: Any, data: st.DataObject, everything: bool) -> None:
    segments, buffer = bucket
    positions = None if everything else data.draw(sparse_vectors(len(buffer), np.dtype(np.float32)))[0]
    expected = buffer.copy()
    values = cpu.take(segments, buffer, positions)
    assert_same_bits(values, reference.take(segments, expected, positions))
    assert_same_bits(buffer, expected)


# --- refused input -------------------------------------------------------------------------------------------------

F32 = np.zeros(8, np.float32)
INT = np.arange(3, dtype=np.int32)
VALUES = np.zeros(3, np.float32)
HUGE = np.broadcast_to(np.float32(0), 2**31)  # one element, repeated: no 8 GiB
HUGE_INT = np.broadcast_to(np.int32(0), 2**31)
SWAPPED = np.zeros(8, np.dtype(np.float32).newbyteorder())

REFUSED = {
    "buffer of 2**31": (lambda: cpu.accumulate([], HUGE), "2147483648 elements.*less than 2"),
    "gradient of 2**31": (lambda: cpu.select([(0, HUGE)], F32, 1), "segment 0: 2147483648 elements"),
    "all_finite of 2**31": (lambda: cpu.all_finite([(0, HUGE)]), "segment 0: 2147483648 elements"),
    "all_finite beyond 2**31": (lambda: cpu.all_finite([(2**31 - 8, F32)]), "ends at 2147483648"),
    "values of 2**31": (lambda: cpu.add(None, HUGE, F32), "2147483648 elements"),
    "indices of 2**31": (lambda: cpu.scatter(HUGE_INT, VALUES, []), "2147483648 elements"),
    "output of 2**31": (lambda: cpu.scatter(INT, VALUES, [(0, HUGE)]), "2147483648 elements"),
    "output beyond 2**31": (lambda: cpu.scatter(INT, VALUES, [(2**31 - 8, F32)]), "ends at 2147483648"),
    "read-only buffer": (lambda: cpu.select([], read_only(F32), 0), "buffer: is read-only"),
    "read-only buffer of add": (lambda: cpu.add(INT, VALUES, read_only(F32)), "buffer: is read-only"),
    "read-only output": (lambda: cpu.scatter(INT, VALUES, [(0, read_only(F32))]), "must be writable"),
    "strided output": (lambda: cpu.scatter(INT, VALUES, [(0, F32[::2])]), "must be contiguous"),
    "strided buffer": (lambda: cpu.accumulate([], F32[::2]), "buffer: must be contiguous"),
    "unaligned buffer": (lambda: cpu.accumulate([], odd_address(F32)), "buffer: must be aligned"),
    "integer buffer": (lambda: cpu.accumulate([], INT.copy()), "buffer: dtype int32"),
    "float16 buffer": (lambda: cpu.accumulate([], F32.astype(np.float16)), "buffer: dtype float16"),
    "swapped buffer": (lambda: cpu.accumulate([], SWAPPED.copy()), "buffer: dtype >f4.*native"),
    "matrix as buffer": (lambda: cpu.accumulate([], np.zeros((2, 2))), "buffer: expected one dimension, not 2"),
    "matrix as gradient": (lambda: cpu.accumulate([(0, np.zeros((2, 2)))], F32), "segment 0: expected one dim"),
    "integer gradient": (lambda: cpu.select([(0, INT)], F32, 1), "segment 0: dtype int32"),
    "complex gradient": (lambda: cpu.all_finite([(0, np.zeros(2, complex))]), "segment 0: dtype complex128"),
    "swapped gradient": (lambda: cpu.select([(0, SWAPPED)], F32, 1), "segment 0: dtype >f4"),
    "segment beyond the end": (lambda: cpu.select([(2, VALUES), (6, VALUES)], F32, 1), "segment 1: ends at 9"),
    "segment before the start": (lambda: cpu.select([(-1, VALUES)], F32, 1), "segment 0: starts at -1, before 0"),
    "overlap": (lambda: cpu.select([(0, VALUES), (2, VALUES)], F32, 1), "segment 1: starts at 2, before 3"),
    "descending": (lambda: cpu.accumulate([(4, VALUES), (0, VALUES)], F32), "segment 1: starts at 0, before 7"),
    "no pair": (lambda: cpu.accumulate([(0,)], F32), "segment 0: expected"),
    "negative k": (lambda: cpu.select([], F32, -1), "k must not be negative, but is -1"),
    "infinite scale": (lambda: cpu.accumulate([], F32, np.inf), "scale must be finite, not inf"),
    "NaN scale": (lambda: cpu.select([], F32, 0, np.nan), "scale must be finite, not nan"),
    "no threads": (lambda: cpu.select([], F32, 0, 1.0, 0), "threads must be 1 .. 1024, not 0"),
    "scatter unsorted": (lambda: cpu.scatter(INT[::-1].copy(), VALUES, []), "does not ascend"),
    "scatter below zero": (lambda: cpu.scatter(INT - 1, VALUES, []), "index -1 at entry 0"),
    "scatter beyond the values": (lambda: cpu.scatter(None, VALUES, [(0, F32)]), "segment 0: ends at 8"),
    "add out of bounds": (lambda: cpu.add(INT + 6, VALUES, F32), "index 8 at entry 2 is outside of 0 .. 8"),
    "add below zero": (lambda: cpu.add(INT - 1, VALUES, F32), "index -1 at entry 0"),
    "add too few": (lambda: cpu.add(None, VALUES, F32), "3 values for all of 8 positions"),
    "add another dtype": (lambda: cpu.add(INT, np.zeros(3), F32), "dtype float64 of the values is not float32"),
    "int64 indices": (lambda: cpu.add(np.arange(3), VALUES, F32), "indices: dtype int64 is not int32"),
    "strided indices": (lambda: cpu.add(np.arange(6, dtype=np.int32)[::2], VALUES, F32), "must be contiguous"),
    "lengths": (lambda: cpu.add(INT, np.zeros(2, np.float32), F32), "3 indices, but 2 values"),
    "unknown level": (lambda: cpu.use_simd("sse9"), "'sse9' is not supported; this machine has: .*portable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    before = F32.copy()
    with pytest.raises(ValueError, match=message):
        call()
    np.testing.assert_array_equal(F32, before)


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="buffer: expected a NumPy array, not <class 'list'>"):
        cpu.accumulate([], [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment 0: expected a NumPy array"):
        cpu.accumulate([(0, [1.0])], F32)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="integer"):
        cpu.accumulate([(0.5, VALUES)], F32)  # type: ignore[list-item]


def test_kernels_for() -> None:
    assert kernels_for(F32) is cpu
    with pytest.raises(TypeError, match=r"builtins\.list"):
        kernels_for([1.0])


# --- the process ---------------------------------------------------------------------------------------------------


def import_with(level: str) -> subprocess.CompletedProcess[str]:
    script = "from horovod_sparse.kernels import cpu; print(cpu.simd_level())"
    environment = {**os.environ, "HOROVOD_SPARSE_SIMD": level}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)


def test_environment_sets_the_level() -> None:
    for level in supported_levels():
        assert import_with(level).stdout == f"{level}\n"
    assert import_with("").stdout == f"{supported_levels()[0]}\n"
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
    "square_norm": lambda values, _: cpu.square_norm([(i * len(values), values) for i in range(10)]),
    "sample": lambda values, _: cpu.sample([(0, values)], np.zeros_like(values), 0.5, 0, 1),
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_gil_is_released(name: str) -> None:
    """Another thread goes on while the kernel works."""
    values, indices = normal(16_000_000), np.arange(16_000_000, dtype=np.int32)
    ticks = [time.perf_counter()]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    LONG_CALLS[name](values, indices)
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(begin < t < end for t in ticks) >= 5


def test_calls_at_the_same_time() -> None:
    """Each call has its own workspace."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(5):
                assert_select([(0, normal(200_000, seed))], normal(200_000, seed + 1), 2000 * seed, 0.5, threads=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures

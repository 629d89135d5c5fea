"""Accumulation and selection on every backend: what the NumPy reference computes, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from backends import ALL, CPU, DEVICE, ONE_OF_EACH, SOME, assert_parity, assert_same
from devices import on_device, to_host
from hypothesis import HealthCheck, given, settings
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
    buckets,
    layered,
    normal,
    sparse_vectors,
)

from horovod_sparse.kernels.types import Velocity

# `import ... as` would find the function of that name.
module = import_module("horovod_sparse.kernels.cuda.select")

Shape = Callable[[int], Array]
THREADS = st.integers(1, 3)
THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 1.5, 2.0, 3.0, 65504.0, 3.4e38, 1e300, np.inf]


@pytest.fixture
def hooks() -> Any:
    """Functions of the extension that only builds for the tests have; a machine with a GPU may have no extension."""
    if not CPU:
        pytest.skip("no CPU kernels here")
    from horovod_sparse.kernels import _cpu

    assert hasattr(_cpu, "force"), "build with HOROVOD_SPARSE_TEST_HOOKS=1, as make venv does (remove the .so before)"
    return _cpu


def active_in(bucket: Any) -> int:
    return sum(len(gradient) for _, gradient in bucket[0])


def parted(buffer: Array) -> list[tuple[int, Array]]:
    """Gradients of a bucket with held positions in the middle."""
    half = len(buffer) // 2
    return [(0, normal(half, seed=1) * buffer[:half].astype(np.float32)), (half + 11, buffer[half + 11 :])]


def four_parts(format_: Any) -> list[tuple[int, Array]]:
    """Gradients of a bucket of 30,020, of very different lengths, with held positions between them."""
    parts = np.split(normal(30_000).astype(format_), [4, 20_004, 20_005])
    starts = np.cumsum([0, *map(len, parts[:-1])]) + 4 * np.arange(4)
    return list(zip(starts.tolist(), parts, strict=True))


def many_small() -> list[tuple[int, Array]]:
    return [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]


# --- select --------------------------------------------------------------------------------------------------------


@given(bucket=buckets(), k=st.integers(0, 320), scale=SCALES, threads=THREADS, on=SOME)
def test_select_small(bucket: Any, k: int, scale: float, threads: int, on: Any) -> None:
    assert_parity("select", *bucket, k, scale, threads=[threads], on=on)


@settings(max_examples=50)
@given(bucket=buckets(), scale=SCALES, threads=THREADS, on=SOME)
def test_select_everything(bucket: Any, scale: float, threads: int, on: Any) -> None:
    assert_parity("select", *bucket, active_in(bucket), scale, threads=[threads], on=on)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_select_distributions(monkeypatch: pytest.MonkeyPatch, shape: Shape, dtype: Any) -> None:
    monkeypatch.setattr(module, "_ALL_ARE_CANDIDATES", 0)  # samples of small buckets, too
    monkeypatch.setattr(module, "_PER_STRATUM", 4)
    for n, densities, on in ((100_003, (0.0001, 0.01, 0.1, 0.3), CPU), (10_003, (0.001, 0.01, 0.3), DEVICE)):
        buffer = shape(n).astype(dtype)
        for density in densities:
            assert_parity("select", parted(buffer), buffer, round(density * n), threads=[2], on=on)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
def test_select_many_elements(hooks: Any, density: float) -> None:
    n = 1_000_017
    before = hooks.fallbacks()
    k = round(density * n)
    assert_parity("select", [(0, layered(n))], normal(n, seed=1), k, 0.7, threads=[1, 2, 3], on=CPU)
    assert hooks.fallbacks() == before, "the sampled thresholds should have been good enough"
    assert_parity("select", [(0, layered(100_017))], normal(100_017, seed=1), k // 10, 0.7, on=DEVICE)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_formats(format_: Any, layout: Callable[[Array], Array], real: Any) -> None:
    """On the device, whole tiles inside a tensor take a fast way, which needs aligned quads; others do not."""
    segments = [(start, layout(part)) for start, part in four_parts(format_)]
    buffer, on = normal(30_020, seed=1).astype(real), ALL if layout is as_given else CPU
    assert_parity("select", segments, buffer, 600, 0.9, threads=[2], on=on)
    assert_parity("select_above", segments, buffer, 2.5, 0.9, threads=[2], waiting=1, on=on)


def test_many_small_tensors() -> None:
    assert_parity("select", many_small(), normal(60_000), 500, threads=[3])
    assert_parity("select_above", many_small(), normal(60_000), 2.0, threads=[3], waiting=1)


@pytest.mark.parametrize("k", [99, 100, 101])
def test_of_equal_magnitudes_the_first_leave(k: int) -> None:
    """Wherever tiles, blocks and threads meet; and the signs do not matter."""
    buffer = np.where(np.arange(30_000) % 3, -0.5, 0.5).astype(np.float32)
    buffer[[0, 1023, 1024, 4095, 4096, 29_999]] = [1, 2, -3, 4, 1, -1]
    indices, _ = assert_parity("select", [(0, np.zeros_like(buffer))], buffer, k, threads=[1, 3])
    expected = [*range(k - 5), 1023, 1024, 4095, 4096, 29_999]
    np.testing.assert_array_equal(indices, expected)


# --- select on the CPU: a sample that misleads ---------------------------------------------------------------------


@contextmanager
def forced(hooks: Any, plan: tuple[float, float, float, int]) -> Iterator[None]:
    hooks.force(plan)
    try:
        yield
    finally:
        hooks.force(None)


LIMITS = st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.5, 2.0, 3.0, 1e30, np.inf, np.nan])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bucket=buckets(),
    share=st.floats(0, 1),
    scale=SCALES,
    threads=THREADS,
    limits=st.tuples(LIMITS, LIMITS),
    high=LIMITS,
    capacity=st.sampled_from([0, 3, 20, 1000]),
)
def test_select_whatever_the_sample_says(
    hooks: Any, bucket: Any, share: float, scale: float, threads: int, limits: Any, high: float, capacity: int
) -> None:
    low, guess = np.sort(limits)
    with forced(hooks, (low, guess, high, capacity)):
        assert_parity("select", *bucket, round(share * active_in(bucket)), scale, threads=[threads], on=CPU)


@pytest.mark.parametrize("sampled", [0.0, 100.0, np.nan])
def test_select_unrepresentative_sample(hooks: Any, sampled: float) -> None:
    """Thresholds far too low (too many candidates) or too high (fewer than k, all of them zeroed in the sweep)."""
    n = 1_000_000
    gradient = normal(n)
    positions = hooks.sample_positions(n)
    gradient[positions] = sampled
    before = hooks.fallbacks()
    k = len(positions) + 50
    assert_parity("select", [(0, gradient)], np.zeros(n, np.float32), k, threads=[1, 3], on=CPU)
    assert hooks.fallbacks() == before + 2 * len(CPU)


@pytest.mark.parametrize("active", [512, 513, 16_384, 10**6, 25 * 10**6, 2**31 - 1])
def test_sample_is_stratified(hooks: Any, active: int) -> None:
    clusters = hooks.sample_positions(active).reshape(-1, 16)
    strata = np.arange(len(clusters) + 1) * (active / len(clusters))
    assert np.all(np.diff(clusters) == 1), "a cluster is adjacent"
    assert np.all(clusters[:, 0] > strata[:-1] - 16)
    assert np.all(clusters[:, 0] < strata[1:])
    assert clusters[0, 0] >= 0
    assert clusters[-1, -1] < active


@pytest.mark.parametrize("width", [4, 64, 1000])
@pytest.mark.parametrize("density", [0.0001, 0.01])
def test_sample_expects_neighbours_to_be_alike(hooks: Any, width: int, density: float) -> None:
    n = 1_000_003
    rows = np.exp(2 * np.random.default_rng(0).standard_normal(n // width + 1, dtype=np.float32))
    gradient = normal(n) * np.repeat(rows, width)[:n]
    before = hooks.fallbacks()
    assert_parity("select", [(0, gradient)], normal(n, seed=1), round(density * n), 0.9, threads=[1, 2], on=CPU[:1])
    assert hooks.fallbacks() == before


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
def test_select_wrong_thresholds(hooks: Any, plan: Any, fallbacks: int) -> None:
    before = hooks.fallbacks()
    with forced(hooks, plan):
        assert_parity("select", [(0, normal(80_000))], np.zeros(80_000, np.float32), 790, threads=[1, 2, 3], on=CPU)
    assert hooks.fallbacks() - before == 3 * len(CPU) * fallbacks


@pytest.mark.parametrize("k", [99, 100, 101])
def test_select_as_many_as_reach_the_bracket(hooks: Any, k: int) -> None:
    """Exactly k candidates reach the high end: none of those between the ends leaves."""
    gradient = np.random.default_rng(0).permutation(1000).astype(np.float32)
    before = hooks.fallbacks()
    with forced(hooks, (800.0, 850.0, 900.0, 10**4)):
        assert_parity("select", [(0, gradient)], np.zeros(1000, np.float32), k, on=CPU)
    assert hooks.fallbacks() == before


# --- select on the device ------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bucket=buckets(), share=st.floats(0, 1), scale=SCALES)
def test_select_small_with_a_sample(monkeypatch: pytest.MonkeyPatch, bucket: Any, share: float, scale: float) -> None:
    monkeypatch.setattr(module, "_ALL_ARE_CANDIDATES", 0)
    monkeypatch.setattr(module, "_PER_STRATUM", 4)
    assert_parity("select", *bucket, round(share * active_in(bucket)), scale, on=DEVICE)


@pytest.mark.parametrize("lead", [1, 4])
def test_select_in_a_part_of_an_array(lead: int) -> None:
    """A buffer that begins at an address of its element's size only."""
    whole, gradient = on_device(normal(20_000)), on_device(normal(20_000, seed=1))
    expected = normal(20_000)
    wanted = reference.select([(0, normal(20_000, seed=1)[lead:])], expected[lead:], 100, 1.0)
    assert_same(DEVICE[0].kernels.select([(0, gradient[lead:])], whole[lead:], 100), wanted)
    assert_same(whole, expected)


def sampling(monkeypatch: pytest.MonkeyPatch, strata: int, low: int, high: int, room: int) -> None:
    monkeypatch.setattr(module._Sample, "of", lambda active, k: module._Sample(strata, low, high, room))


@pytest.mark.parametrize("room", [0, 100, 799, 800, 801])
@pytest.mark.parametrize("strata", [0, 128])
def test_select_without_room_for_the_candidates(monkeypatch: pytest.MonkeyPatch, room: int, strata: int) -> None:
    """With too little room the whole buffer is searched."""
    sampling(monkeypatch, strata, 30, 5, room)
    buffer = normal(9000, seed=1).astype(REALS[room % 2])
    assert_parity("select", [(5, normal(8000)), (8100, normal(100))], buffer, 800, on=DEVICE)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("real", REALS, ids=str)
def test_select_with_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch, rank: int, real: Any) -> None:
    """A threshold that fewer than k reach."""
    sampling(monkeypatch, 256, rank, 0, 8000)
    assert_parity("select", [(5, normal(8000))], normal(8100, seed=1).astype(real), 800, on=DEVICE)


def test_select_far_above_the_expected_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th key lies in the last bin of the candidates' histogram, which has no upper end."""
    sampling(monkeypatch, 256, 200, 190, 8000)
    assert_parity("select", [(0, normal(8000))], normal(8000, seed=1), 10, on=DEVICE)


def test_room_is_little_more_than_k() -> None:
    """Candidates and result together are less than 5 % of a residual, from 16M elements on."""
    for active in (2**24, 25_600_000, 110_000_000, 336_000_000):
        for density in (0.001, 0.01):
            k = round(density * active)
            statuses = 8 * (active / 4096 + active / 1024)
            assert 8 * (module._Sample.of(active, k).capacity + k) + statuses < 0.05 * 4 * active


@pytest.mark.parametrize("density", [0.0001, 0.01])
@pytest.mark.parametrize("shape", [normal, layered])
def test_samples_suffice(density: float, shape: Shape) -> None:
    """Neither too few candidates nor too many, for magnitudes like those of gradients."""
    n = 1_000_000
    k, x = round(density * n), shape(n)
    sample = module._Sample.of(n, k)
    table = module.Table([(0, on_device(x))], n)
    selection = module._Selection(table, cupy.zeros(n, np.float32), sample.capacity)
    selection.estimate(module._AccumulateArgs.of(selection._buffer, 1.0, None, False, None), sample)
    threshold = to_host(selection._plan[16:20]).view(np.int32)[0]
    assert k <= int((reference.magnitude(x) >= threshold).sum()) <= sample.capacity


# --- select_above --------------------------------------------------------------------------------------------------


@given(
    bucket=buckets(), threshold=st.sampled_from(THRESHOLDS) | st.floats(0, 10), scale=SCALES, threads=THREADS, on=SOME
)
def test_select_above_small(bucket: Any, threshold: float, scale: float, threads: int, on: Any) -> None:
    assert_parity("select_above", *bucket, threshold, scale, threads=[threads], waiting=1, on=on)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_select_above_distributions(shape: Shape, dtype: Any) -> None:
    """Every threshold is a magnitude that occurs, so that it is met exactly; held positions split the bucket."""
    n = 100_003
    buffer = shape(n).astype(dtype)
    acc = buffer.copy()
    reference.accumulate(parted(buffer), acc)
    numbers = np.sort(np.abs(acc[~np.isnan(acc)]))[::-1]
    for share in (0.0, 0.001, 0.3, 1.0):
        threshold = numbers[int(share * (len(numbers) - 1))]
        indices, _ = assert_parity("select_above", parted(buffer), buffer, threshold, threads=[2], on=CPU)
        assert len(indices) > 0


@pytest.mark.parametrize("threshold", [0.5, 3.0, 30.0])
def test_select_above_many(threshold: float) -> None:
    n = 1_000_017
    assert_parity("select_above", [(0, layered(n))], normal(n, seed=1), threshold, 0.7, threads=[1, 2, 3], on=CPU)


@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 2.5])
def test_select_above_more_than_expected(real: Any, threshold: float) -> None:
    """On the device, more entries than there is room for candidates."""
    segments, buffer = [(0, normal(50_000)), (50_100, normal(5000))], normal(60_000, seed=1).astype(real)
    assert_parity("select_above", segments, buffer, threshold, waiting=1, on=DEVICE)


@pytest.mark.skipif(not CPU, reason="about the CPU's memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_grows_during_a_call(threads: int) -> None:
    """More entries than are kept from call to call, so that their memory starts small and grows."""
    n = 9_000_000
    gradient, buffer = normal(n), np.zeros(n, np.float32)
    indices, values = CPU[0].kernels.select_above([(0, gradient)], buffer, 0.0, threads=threads)
    assert np.array_equal(indices, np.arange(n))
    assert np.array_equal(values, gradient)
    assert not buffer.any()
    indices, values = CPU[0].kernels.select_above([(0, gradient)], buffer, 0.1, threads=threads)
    assert np.array_equal(indices, np.flatnonzero(np.abs(gradient) >= np.float32(0.1)))
    assert np.array_equal(values, gradient[indices])


def test_zero_takes_all_but_the_held() -> None:
    buffer = np.array([0.0, -0.0, 1e-45, np.nan, np.inf, 7.0, 8.0], np.float32)
    indices, _ = assert_parity("select_above", [(0, np.zeros(5, np.float32))], buffer, 0.0, waiting=1)
    assert indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("threshold", [1.0, 3.4e38, np.inf, 1e300])
def test_nan_leaves_whatever_the_threshold(threshold: float) -> None:
    buffer = np.array([0.5, np.nan, -np.nan, -np.inf] * 100, np.float32)
    indices, _ = assert_parity("select_above", [(0, np.zeros(400, np.float32))], buffer, threshold, waiting=1)
    np.testing.assert_array_equal(indices % 4, np.tile([1, 2, 3], 100))


def test_threshold_is_rounded_to_the_buffer() -> None:
    """0.7 is above float32's nearest number to it, which reaches it nevertheless."""
    nearest = np.full(100, 0.7, np.float32)
    for real, count in zip(REALS, (100, 0), strict=True):
        indices, _ = assert_parity("select_above", [(0, nearest)], np.zeros(100, real), 0.7, waiting=1)
        assert len(indices) == count


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
for room in range(20 * threads - 20, 160, 4):  # a thread needs some memory to start
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


@pytest.mark.skipif(not CPU, reason="about the CPU's memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_leaves_when_memory_runs_out(threads: int) -> None:
    """Whether the scratch memory cannot grow or the result has no room."""
    command = [sys.executable, "-c", OUT_OF_MEMORY.format(threads=threads)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout == "done failed\n", run.stderr


# --- cut and take --------------------------------------------------------------------------------------------------


@given(data=st.data(), size=st.integers(0, 40), dtype=st.sampled_from(REALS), k=st.integers(0, 50), on=SOME)
def test_cut_takes_what_select_would(data: st.DataObject, size: int, dtype: Any, k: int, on: Any) -> None:
    assert_parity("cut", np.arange(0, 3 * size, 3, dtype=np.int32), data.draw(arrays(dtype, size)), k, on=on)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "tied", "zero"])
def test_cut_of_many(dtype: Any, kind: str) -> None:
    n = 10_000
    values = {"normal": normal(n), "tied": np.round(normal(n) * 3), "zero": np.zeros(n)}[kind].astype(dtype)
    for k in (0, 1, 2500, n - 1, n):
        assert_parity("cut", np.arange(n, dtype=np.int32) * 3, values, k)


@settings(max_examples=60)
@given(bucket=buckets(), data=st.data(), everything=st.booleans(), on=SOME)
def test_take(bucket: Any, data: st.DataObject, everything: bool, on: Any) -> None:
    positions = None if everything else data.draw(sparse_vectors(len(bucket[1]), np.dtype(np.float32)))[0]
    assert_parity("take", *bucket, positions, on=on)


@pytest.mark.parametrize("real", REALS, ids=str)
def test_nan_moves_with_its_payload(real: Any) -> None:
    bits = np.dtype(f"u{real.itemsize}")
    nan = np.full(5, np.nan, real).view(bits) + np.arange(5, dtype=bits)
    at, zeros = np.arange(5, dtype=np.int32), np.zeros(5, real)
    for backend in ONE_OF_EACH:
        with backend.active() as kernels:
            (_, largest), (_, rest) = kernels.cut(backend.put(at), backend.put(nan.view(real)), 3)
            taken = kernels.take([(0, backend.put(zeros))], backend.put(nan.view(real)), backend.put(at))
        moved = np.sort(np.concatenate([to_host(largest), to_host(rest)]).view(bits))
        np.testing.assert_array_equal(moved, nan)
        np.testing.assert_array_equal(to_host(taken).view(bits), nan)


# --- accumulate ----------------------------------------------------------------------------------------------------


@given(bucket=buckets(), scale=SCALES, threads=THREADS, on=SOME)
def test_accumulate(bucket: Any, scale: float, threads: int, on: Any) -> None:
    assert_parity("accumulate", *bucket, scale, threads=[threads], on=on)


@pytest.mark.parametrize("scale", [1.0, 0.0, 1 / 3])
def test_accumulate_rounds_product_and_sum_separately(scale: float) -> None:
    assert_parity("accumulate", [(0, normal(20_001, seed=1))], normal(20_001), scale)


def test_scale_zero_ignores_nan() -> None:
    buffer = np.full(100, np.nan, np.float32)
    assert_parity("accumulate", [(0, np.ones(60, np.float32))], buffer, 0.0)


@pytest.mark.parametrize("format_", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_every_16_bit_number_widens(format_: Any, real: Any) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(format_)
    assert_parity("accumulate", [(0, every)], np.ones(2**16, real), 0.0)


def test_gradients_on_the_device_that_are_not_contiguous_are_copied() -> None:
    wide, ours, expected = on_device(normal(3000)), on_device(normal(1000, seed=1)), normal(1000, seed=1)
    DEVICE[0].kernels.accumulate([(0, wide[::3])], ours)
    reference.accumulate([(0, normal(3000)[::3])], expected)
    assert_same(ours, expected)


# --- beside a source, and with gradients that are left zero --------------------------------------------------------


def plain(bucket: Any) -> Any:
    """A bucket whose gradients can be written to."""
    gradients, buffer = bucket
    return [(start, np.array(gradient)) for start, gradient in gradients], buffer


@settings(max_examples=60)
@given(bucket=buckets(), share=st.floats(0, 1), scale=SCALES, threads=THREADS, apart=st.booleans(), on=SOME)
def test_gradients_are_left_zero_and_a_source_as_it_is(
    bucket: Any, share: float, scale: float, threads: int, apart: bool, on: Any
) -> None:
    gradients, buffer = plain(bucket)
    how = {"clear": True, "source": buffer[::-1].copy() if apart else None}
    k = round(share * active_in(bucket))
    assert_parity("accumulate", gradients, buffer, scale, threads=[threads], on=on, **how)
    assert_parity("select", gradients, buffer, k, scale, threads=[threads], on=on, **how)
    assert_parity("select_above", gradients, buffer, 1.0, scale, threads=[threads], waiting=1, on=on, **how)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("clear", [False, True])
def test_formats_beside_a_source(format_: Any, real: Any, clear: bool) -> None:
    segments = four_parts(format_)
    buffer, source = (normal(30_020, seed=seed).astype(real) for seed in (1, 2))
    assert_parity("select", segments, buffer, 600, 0.9, threads=[2], source=source, clear=clear)
    assert_parity("select_above", segments, buffer, 2.5, 0.9, threads=[2], waiting=1, source=source, clear=clear)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bucket=buckets(),
    share=st.floats(0, 1),
    scale=SCALES,
    limits=st.tuples(LIMITS, LIMITS),
    high=LIMITS,
    capacity=st.sampled_from([0, 3, 20, 1000]),
)
def test_select_beside_a_source_whatever_the_sample_says(
    hooks: Any, bucket: Any, share: float, scale: float, limits: Any, high: float, capacity: int
) -> None:
    gradients, buffer = plain(bucket)
    how = {"clear": True, "source": buffer[::-1].copy()}
    low, guess = np.sort(limits)
    with forced(hooks, (low, guess, high, capacity)):
        assert_parity("select", gradients, buffer, round(share * active_in(bucket)), scale, on=CPU, **how)


def test_select_many_elements_beside_a_source(hooks: Any) -> None:
    n, before = 1_000_017, hooks.fallbacks()
    how = {"source": normal(n, seed=2), "clear": True}
    assert_parity("select", [(3, layered(n - 7))], normal(n, seed=1), 10_000, 0.7, threads=[1, 2, 3], on=CPU, **how)
    assert hooks.fallbacks() == before


# --- with momentum on the way --------------------------------------------------------------------------------------

MOMENTA = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([1.0, 0.1, 0.0]), st.booleans())


@settings(max_examples=80)
@given(
    bucket=buckets(),
    share=st.floats(0, 1),
    scale=SCALES,
    how=MOMENTA,
    clear=st.booleans(),
    threads=THREADS,
    on=SOME,
)
def test_momentum_is_applied_on_the_way(
    bucket: Any, share: float, scale: float, how: Any, clear: bool, threads: int, on: Any
) -> None:
    gradients, buffer = plain(bucket)
    options = {"clear": clear, "velocity": Velocity(normal(len(buffer), seed=3).astype(buffer.dtype), *how)}
    k = round(share * active_in(bucket))
    assert_parity("accumulate", gradients, buffer, scale, threads=[threads], on=on, **options)
    assert_parity("select", gradients, buffer, k, scale, threads=[threads], on=on, **options)
    assert_parity("select_above", gradients, buffer, 1.0, scale, threads=[threads], waiting=1, on=on, **options)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_formats_with_momentum(format_: Any, real: Any, nesterov: bool) -> None:
    """On the device, whole tiles inside a tensor take a fast way; on the CPU, tiles are converted first."""
    segments = four_parts(format_)
    buffer, values = (normal(30_020, seed=seed).astype(real) for seed in (1, 2))
    options = {"velocity": Velocity(values, 0.9, 0.3, nesterov), "clear": True}
    assert_parity("select", segments, buffer, 600, 0.9, threads=[2], **options)
    assert_parity("select_above", segments, buffer, 2.5, 0.9, threads=[2], waiting=1, **options)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bucket=buckets(),
    share=st.floats(0, 1),
    limits=st.tuples(LIMITS, LIMITS),
    high=LIMITS,
    capacity=st.sampled_from([0, 3, 20, 1000]),
    how=MOMENTA,
)
def test_momentum_is_applied_once_whatever_the_sample_says(
    hooks: Any, bucket: Any, share: float, limits: Any, high: float, capacity: int, how: Any
) -> None:
    gradients, buffer = plain(bucket)
    options = {"clear": True, "velocity": Velocity(normal(len(buffer), seed=3).astype(buffer.dtype), *how)}
    low, guess = np.sort(limits)
    with forced(hooks, (low, guess, high, capacity)):
        assert_parity("select", gradients, buffer, round(share * active_in(bucket)), 0.7, on=CPU, **options)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_sample_sees_the_momentum(hooks: Any, nesterov: bool) -> None:
    """The velocity is far larger than the gradient: an estimate without it would be of no use."""
    n, before = 1_000_017, hooks.fallbacks()
    options = {"velocity": Velocity(100 * layered(n), 0.9, 1.0, nesterov), "clear": True}
    assert_parity("select", [(3, normal(n - 7))], normal(n, seed=1), 10_000, 0.7, threads=[1, 3], on=CPU, **options)
    assert hooks.fallbacks() == before

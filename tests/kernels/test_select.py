"""Accumulation and selection on every backend are bitwise identical to the NumPy reference."""

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
from backends import ALL, CPU, DEVICE, ONE_OF_EACH, SOME, OnHost, assert_parity, assert_same
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

from horovod_sparse.kernels.cuda import launch
from horovod_sparse.kernels.types import Velocity

# `import ... as` would find the function of that name.
module = import_module("horovod_sparse.kernels.cuda.select")

Shape = Callable[[int], Array]
THREADS = st.integers(1, 3)
THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 1.5, 2.0, 3.0, 65504.0, 3.4e38, 1e300, np.inf]


@pytest.fixture
def hooks() -> Any:
    """Functions of the extension that only builds for the tests have."""
    from horovod_sparse.kernels import _cpu

    assert hasattr(_cpu, "force"), "build with HOROVOD_SPARSE_TEST_HOOKS=1, as make venv does (remove the .so before)"
    return _cpu


MOMENTA = st.tuples(
    *(st.sampled_from(numbers) for numbers in ([0.0, 0.5, 0.9], [1.0, 0.1, 0.0], [0.0, 1.0, 4.0], [0.9, 0.6]))
)


@st.composite
def accumulations(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """A bucket, and some of the options: a source, a velocity, and that the gradients are left zero."""
    (gradients, buffer), options = draw(buckets()), {}
    if draw(st.booleans()):
        options["source"] = buffer[::-1].copy()
    if draw(st.booleans()):
        options["velocity"] = Velocity(normal(len(buffer), seed=3).astype(buffer.dtype), *draw(MOMENTA))
    if draw(st.booleans()):
        options["clear"] = True
        gradients = [(start, np.array(gradient)) for start, gradient in gradients]
    return (gradients, buffer), options


# The same for a large bucket, with one more array of its size.
OPTIONS: dict[str, Callable[[Array], dict[str, Any]]] = {
    "none": lambda x: {},
    "source": lambda x: {"source": x},
    "source, cleared": lambda x: {"source": x, "clear": True},
    "momentum": lambda x: {"velocity": Velocity(x, 0.9, 0.3), "clear": True},
    "nesterov": lambda x: {"velocity": Velocity(x, 0.9, 0.3, fresh=4.0, weight=0.6), "clear": True},
}


def part_of(bucket: Any, share: float) -> int:
    """A share of the elements that are not held."""
    return round(share * sum(len(gradient) for _, gradient in bucket[0]))


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
    return [(40 * i, normal(i % 41, seed=i)) for i in range(500)]


@settings(max_examples=100)
@given(
    case=accumulations(),
    share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1.2),
    threshold=st.sampled_from(THRESHOLDS) | st.floats(0, 10),
    scale=SCALES,
    threads=THREADS,
    on=SOME,
)
def test_small_buckets(case: Any, share: float, threshold: float, scale: float, threads: int, on: Any) -> None:
    """Scale 0 ignores what was there, even NaN."""
    bucket, options = case
    how = {"threads": [threads], "on": on, **options}
    assert_parity("accumulate", *bucket, scale, **how)
    assert_parity("select", *bucket, part_of(bucket, share), scale, **how)
    assert_parity("select_above", *bucket, threshold, scale, waiting=1, **how)


# --- select --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_select_distributions(monkeypatch: pytest.MonkeyPatch, shape: Shape, dtype: Any) -> None:
    monkeypatch.setattr(module, "_ALL_ARE_CANDIDATES", 0)  # samples of small buckets, too
    monkeypatch.setattr(module, "_PER_STRATUM", 4)
    for n, densities, on in ((100_003, (0.0001, 0.01, 0.1, 0.3), CPU), (10_003, (0.001, 0.01, 0.3), DEVICE)):
        buffer = shape(n).astype(dtype)
        for density in densities:
            assert_parity("select", parted(buffer), buffer, round(density * n), threads=[2], on=on)


@pytest.mark.parametrize(("density", "options"), [(0.001, "none"), (0.2, "none"), *((0.01, one) for one in OPTIONS)])
def test_select_many_elements(hooks: Any, density: float, options: str) -> None:
    """A source and a velocity are far larger than the gradient: an estimate without them would be of no use."""
    before = hooks.fallbacks()
    for n, threads, on in ((1_000_017, [1, 2, 3], CPU), (100_017, [1], DEVICE)):
        bucket, how = ([(3, layered(n - 7))], normal(n, seed=1)), OPTIONS[options](100 * normal(n, seed=2))
        assert_parity("select", *bucket, round(density * n), 0.7, threads=threads, on=on, **how)
    assert hooks.fallbacks() == before, "the sampled thresholds should have been good enough"


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize(
    ("layout", "options"), [*((layout, "none") for layout in LAYOUTS), *((as_given, one) for one in [*OPTIONS][1:])]
)
def test_formats(format_: Any, real: Any, layout: Callable[[Array], Array], options: str) -> None:
    """On the device, tiles that lie inside a tensor take a fast path, which needs aligned quads."""
    segments, on = [(start, layout(part)) for start, part in four_parts(format_)], ALL if layout is as_given else CPU
    buffer, other = (normal(30_020, seed=seed).astype(real) for seed in (1, 2))
    how = OPTIONS[options](other)
    assert_parity("select", segments, buffer, 600, 0.9, threads=[2], on=on, **how)
    assert_parity("select_above", segments, buffer, 2.5, 0.9, threads=[2], waiting=1, on=on, **how)


def test_many_small_tensors() -> None:
    assert_parity("select", many_small(), normal(20_000), 200, threads=[3])
    assert_parity("select_above", many_small(), normal(20_000), 2.0, threads=[3], waiting=1)


# --- select on the CPU: a sample that misleads ---------------------------------------------------------------------


@contextmanager
def forced(hooks: Any, plan: tuple[float, float, float, int]) -> Iterator[None]:
    hooks.force(plan)
    try:
        yield
    finally:
        hooks.force(None)


LIMITS = st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.5, 2.0, 3.0, 1e30, np.inf, np.nan])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=accumulations(),
    share=st.floats(0, 1),
    scale=SCALES,
    threads=THREADS,
    limits=st.tuples(LIMITS, LIMITS),
    high=LIMITS,
    capacity=st.sampled_from([0, 3, 20, 1000]),
)
def test_select_with_any_sampled_thresholds(
    hooks: Any, case: Any, share: float, scale: float, threads: int, limits: Any, high: float, capacity: int
) -> None:
    """Gradients are added, cleared and taken into the velocity once, although some tiles are read again."""
    bucket, options = case
    low, guess = np.sort(limits)
    with forced(hooks, (low, guess, high, capacity)):
        assert_parity("select", *bucket, part_of(bucket, share), scale, threads=[threads], on=CPU, **options)


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


# --- select on the device ------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bucket=buckets(), share=st.floats(0, 1), scale=SCALES)
def test_select_small_with_a_sample(monkeypatch: pytest.MonkeyPatch, bucket: Any, share: float, scale: float) -> None:
    monkeypatch.setattr(module, "_ALL_ARE_CANDIDATES", 0)
    monkeypatch.setattr(module, "_PER_STRATUM", 4)
    assert_parity("select", *bucket, part_of(bucket, share), scale, on=DEVICE)


@pytest.mark.parametrize("lead", [1, 4])
def test_select_in_a_part_of_an_array(lead: int) -> None:
    """A buffer that begins at an address of its element's size only."""
    whole, gradient = on_device(normal(20_000)), on_device(normal(20_000, seed=1))
    expected = normal(20_000)
    wanted = reference.select([(0, normal(20_000, seed=1)[lead:])], expected[lead:], 100, 1.0)
    assert_same(DEVICE[0].kernels.select([(0, gradient[lead:])], whole[lead:], 100), wanted)
    assert_same(whole, expected)


@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize(
    ("sample", "k"),
    [
        # With too little room for the candidates, the whole buffer is searched.
        *(((strata, 30, 5, room), 800) for strata in (0, 128) for room in (0, 100, 799, 800, 801)),
        # A threshold that fewer than k reach.
        *(((256, rank, 0, 8000), 800) for rank in (1, 5)),
        # The k-th key lies in the last bin of the candidates' histogram, which has no upper end.
        ((256, 200, 190, 8000), 10),
    ],
)
def test_select_with_a_sample_that_misleads(
    monkeypatch: pytest.MonkeyPatch, sample: tuple[int, int, int, int], k: int, real: Any
) -> None:
    monkeypatch.setattr(module._Sample, "of", lambda active, k: module._Sample(*sample))
    segments, buffer = [(5, normal(8000)), (8100, normal(100))], normal(9000, seed=1).astype(real)
    assert_parity("select", segments, buffer, k, on=DEVICE)


@pytest.mark.parametrize(
    ("size", "density", "percent"),
    [
        *((2**24, 0.01, 4.96), (25_600_000, 0.01, 4.91), (110_000_000, 0.01, 4.85), (336_000_000, 0.01, 4.83)),
        *((25_600_000, 0.001, 0.86), (110_000_000, 0.001, 0.80), (336_000_000, 0.001, 0.78)),
    ],
)
def test_memory_of_a_selection(monkeypatch: pytest.MonkeyPatch, size: int, density: float, percent: float) -> None:
    """Everything that is allocated, in percent of the residual; docs/gpu.md has the same figures."""
    buffer, allocated, empty = unwritten(size), [], cupy.empty

    def counting(*given: Any) -> Any:
        array = empty(*given)
        allocated.append(array.nbytes)
        return array

    monkeypatch.setattr(launch.Module, "launch", lambda *_, **__: None)
    monkeypatch.setattr(cupy, "empty", counting)
    DEVICE[0].kernels.select([(0, buffer)], buffer, round(density * size))
    assert 100 * sum(allocated) / buffer.nbytes == pytest.approx(percent, abs=0.005)


def unwritten(size: int) -> Any:
    """Return an array of the device whose pages the system never has to provide."""
    host = np.empty(size, np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray((size,), np.float32, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("density", [0.0001, 0.01])
@pytest.mark.parametrize("shape", [normal, layered])
def test_samples_suffice(density: float, shape: Shape) -> None:
    """Samples give neither too few nor too many candidates for magnitudes like those of gradients."""
    n = 1_000_000
    k, x = round(density * n), shape(n)
    sample = module._Sample.of(n, k)
    table = module.Table([(0, on_device(x))], n)
    selection = module._Selection(table, cupy.zeros(n, np.float32), sample.capacity)
    selection.estimate(module._prepare([], selection._buffer, 1.0)[1], sample)
    threshold = to_host(selection._plan[16:20]).view(np.int32)[0]
    assert k <= int((reference.magnitude(x) >= threshold).sum()) <= sample.capacity


# --- select_above --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.7, 2.5, 30.0])
def test_select_above_many(threshold: float) -> None:
    """On the device, the lowest thresholds leave more candidates than memory holds."""
    n = 1_000_017
    assert_parity("select_above", [(0, layered(n))], normal(n, seed=1), threshold, 0.7, threads=[1, 2, 3], on=CPU)
    segments, buffer = [(0, normal(50_000)), (50_100, normal(5000))], normal(60_000, seed=1)
    for real in REALS:
        assert_parity("select_above", segments, buffer.astype(real), threshold, waiting=1, on=DEVICE)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_grows_during_a_call(threads: int) -> None:
    """More entries than are kept from call to call, so that their memory starts small and grows."""
    n = 9_000_000
    gradient, buffer = normal(n), np.zeros(n, np.float32)
    for threshold in (0.0, 0.1):
        assert not buffer.any()
        indices, values = CPU[0].kernels.select_above([(0, gradient)], buffer, threshold, threads=threads)
        assert np.array_equal(indices, np.flatnonzero(np.abs(gradient) >= np.float32(threshold)))
        assert np.array_equal(values, gradient[indices])


def test_threshold_is_rounded_to_the_buffer() -> None:
    """float32's nearest number to 0.7 is below it, and is selected nevertheless."""
    nearest = np.full(100, 0.7, np.float32)
    for real, count in zip(REALS, (100, 0), strict=True):
        indices, _ = assert_parity("select_above", [(0, nearest)], np.zeros(100, real), 0.7, waiting=1)
        assert len(indices) == count
        counts = assert_parity(
            "count_reaching", [(0, nearest)], nearest.astype(real), OnHost(np.array([0.7])), waiting=1
        )
        assert counts.tolist() == [count]


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


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_selected_if_memory_runs_out(threads: int) -> None:
    """Either the scratch memory cannot grow, or the result cannot be allocated."""
    command = [sys.executable, "-c", OUT_OF_MEMORY.format(threads=threads)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout == "done failed\n", run.stderr


# --- cut and take --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data(), size=st.integers(0, 40), dtype=st.sampled_from(REALS), k=st.integers(0, 50), on=SOME)
def test_cut_selects_like_select(data: st.DataObject, size: int, dtype: Any, k: int, on: Any) -> None:
    assert_parity("cut", np.arange(0, 3 * size, 3, dtype=np.int32), data.draw(arrays(dtype, size)), k, on=on)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "tied", "zero"])
def test_cut_of_many(dtype: Any, kind: str) -> None:
    n = 10_000
    values = {"normal": normal(n), "tied": np.round(normal(n) * 3), "zero": np.zeros(n)}[kind].astype(dtype)
    for k in (0, 1, 2500, n - 1, n):
        assert_parity("cut", np.arange(n, dtype=np.int32) * 3, values, k)


@settings(max_examples=40)
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

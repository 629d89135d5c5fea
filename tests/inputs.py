"""Inputs of the kernel tests in every format, layout and kind of number, and the comparison of results."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.float64)]
REALS = [np.dtype(np.float32), np.dtype(np.float64)]
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, -1e-45, 5e-324, 3.4e38, 65504.0]


def supported_levels() -> list[str]:
    from horovod_sparse.kernels import cpu

    before, levels = cpu.simd_level(), []
    for level in ("avx512", "avx2", "portable"):
        with suppress(ValueError):
            cpu.use_simd(level)
            levels.append(level)
    cpu.use_simd(before)
    return levels


def as_given(x: Array) -> Array:
    return x.copy()


def every_third(x: Array) -> Array:
    wide = np.zeros(3 * len(x), x.dtype)
    wide[::3] = x
    return wide[::3]


def reversed_(x: Array) -> Array:
    return x[::-1].copy()[::-1]


def odd_address(x: Array) -> Array:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(x.dtype)
    shifted[:] = x
    return shifted


def one_repeated(x: Array) -> Array:
    return np.broadcast_to(x[0], len(x)) if len(x) else x


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


def twin(x: Array) -> Array:
    """Return a copy with the same strides and address alignment; read-only arrays are returned unchanged."""
    if x.ndim != 1 or not x.size or 0 in x.strides or not x.flags.writeable:
        return x
    span = (len(x) - 1) * x.strides[0]
    memory = np.empty(abs(span) + 128, np.uint8)
    lead = (x.ctypes.data - memory.ctypes.data - max(-span, 0)) % 64 + max(-span, 0)
    copy: Array = np.ndarray(x.shape, x.dtype, memory, lead, x.strides)
    copy[:] = x
    return copy


LAYOUTS = [as_given, every_third, reversed_, odd_address, one_repeated, read_only]


def numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[float]:
    """Return a strategy for numbers of a dtype, often special ones; every NaN has the standard payload."""
    few = st.sampled_from([float(dtype.type(x)) for x in SPECIAL])
    return few | st.integers(-3, 3).map(float) | st.floats(width=32, allow_nan=False)


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any], size: int) -> Array:
    """Draw an array of a few distinct numbers, each of which occurs often."""
    few = draw(st.lists(numbers(dtype), min_size=1, max_size=8))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.choice(few, size).astype(dtype)


@st.composite
def gradients(draw: st.DrawFn, size: int) -> list[tuple[int, Array]]:
    """Draw segments with gaps, in every format and layout."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    segments = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        flat = draw(arrays(draw(st.sampled_from(FORMATS)), stop - start))
        segments.append((start, draw(st.sampled_from(LAYOUTS))(flat)))
    return segments


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[tuple[int, Array]], Array]:
    buffer = draw(arrays(draw(st.sampled_from(REALS)), draw(st.integers(0, 300))))
    return draw(gradients(len(buffer))), buffer


SCALES = st.sampled_from([1.0, 0.0, 0.3, -1.7, 1e-30, 1e30])


@st.composite
def sparse_vectors(draw: st.DrawFn, size: int, dtype: Any) -> tuple[Array, Array]:
    chosen = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=40)) if size else []
    return np.array(sorted(chosen), np.int32), draw(arrays(dtype, len(chosen)))


def assert_same_bits(ours: Array, expected: Array, where: str = "") -> None:
    """Assert that bits are equal, except for the sign and payload of NaN, which IEEE 754 leaves open."""
    assert ours.dtype == expected.dtype, where
    assert ours.shape == expected.shape, where
    if ours.tobytes() == expected.tobytes():
        return
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan, where)
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    np.testing.assert_array_equal(ours[~nan].view(bits), expected[~nan].view(bits), where)


# --- large inputs: arrays by bucket size ---


def normal(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32)


def layered(n: int) -> Array:
    """Return layers of very different magnitudes, one of them zero, like the gradients of a network."""
    x = normal(n)
    for i, part in enumerate(np.array_split(x, 7)):
        part *= 10.0 ** (i - 4) * (i != 3)
    return x


def ascending(n: int) -> Array:
    return np.arange(n, dtype=np.float32)


def mostly_zero(n: int) -> Array:
    return normal(n) * (np.arange(n) % 1013 == 0)


def coarse(n: int) -> Array:
    return np.round(normal(n) * 3)


def with_nan(n: int) -> Array:
    x = normal(n)
    x[::1009] = np.nan
    x[5::100003] = -np.inf
    return x


def denormal(n: int) -> Array:
    return normal(n) * np.float32(1e-40)


def constant(n: int) -> Array:
    return np.full(n, -0.5, np.float32)


SHAPES = [normal, layered, ascending, mostly_zero, coarse, with_nan, denormal, constant, np.zeros]


# --- values for wire formats ---

NARROWING = [
    ("float16", "float32"),
    ("bfloat16", "float32"),
    *((one, "float64") for one in ("float32", "float16", "bfloat16")),
]


def difficult(name: str, dtype: Any) -> Array:
    """Return all values of a 16-bit format, the midpoints between them, the neighbors of these, and random numbers."""
    real = np.dtype(dtype)
    every = np.arange(2**16, dtype=np.uint16).view(BFLOAT16 if name == "bfloat16" else np.float16).astype(real)
    middles = (every[:-1] + every[1:]) / 2
    beside = [np.nextafter(middles, real.type(limit)) for limit in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.uint64).view(real)
    return np.concatenate([every, middles, *beside, random, -random, normal(20_000, seed=1).astype(real)])

"""The laws of a wire, on any device: ``put`` brings a NumPy array there.

A vector is parted into what survives the way and the rounding error, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from inputs import Array

from horovod_sparse.collectives.wire import Wire
from horovod_sparse.kernels import to_host
from horovod_sparse.vector import SparseVector

Put = Callable[[Array], Any]

FORMATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Beyond float16 and bfloat16, subnormal in either, halfway between two neighbours, and too large for an exact rest.
SPECIAL = [0, -0.0, 65504, 65520, -7e4, 3.395e38, 3.4e38, 6e-8, 2e-8, 1e-40, 1 + 2**-8, 1 + 2**-11, 2**30 + 128, -1e30]
NARROWING = [("float16", "float32"), ("bfloat16", "float32"), *((name, "float64") for name in FORMATS)]


def sparse(put: Put, values: Any, dtype: Any = "float32") -> SparseVector:
    values = np.asarray(values, dtype)
    return SparseVector(put(np.arange(values.size, dtype=np.int32) * 3), put(values), 3 * values.size)


def numbers(dtype: Any) -> st.SearchStrategy[list[float]]:
    width = 8 * np.dtype(dtype).itemsize
    special = st.sampled_from([float(np.dtype(dtype).type(one)) for one in SPECIAL])
    return st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False) | special, max_size=20)


def nearest(values: Array, name: str) -> Array:
    """Reference: to nearest even, of numbers inside the format's range."""
    if name != "bfloat16":
        return values.astype(FORMATS[name])
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def difficult(name: str, dtype: Any) -> Array:
    """Numbers of a dtype that 16 bits hold, the middles between neighbours, what lies just beside them, random bits."""
    real = np.dtype(dtype)
    every = np.arange(2**16, dtype=np.uint16).view(FORMATS[name] if "16" in name else np.float16).astype(real)
    middles = (every[:-1] + every[1:]) / 2
    beside = [np.nextafter(middles, real.type(limit)) for limit in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.uint64).view(real)
    normal = np.random.default_rng(1).standard_normal(20_000).astype(real)
    return np.concatenate([every, middles, *beside, random, -random, normal])


def parts(name: str, vector: SparseVector) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Indices and values of what a wire rounds a vector to, and of the errors, on the host."""
    rounded, error = Wire(name).round(vector)
    return tuple((to_host(one.entries[0]), to_host(one.values)) for one in (rounded, error))  # type: ignore[return-value]


def check_parts(put: Put, name: str, dtype: str, values: list[float]) -> None:
    """What survives and the error are exactly the vector."""
    vector = sparse(put, values, dtype)
    rounded, error = parts(name, vector)
    lost = dict(zip(*(one.tolist() for one in error), strict=True))
    assert np.array_equal(rounded[0], 3 * np.arange(len(values)))
    survived = zip(*(one.tolist() for one in rounded), strict=True)
    sums = [Fraction(value) + Fraction(lost.get(index, 0)) for index, value in survived]
    assert sums == [Fraction(value) for value in to_host(vector.values).tolist()]
    assert np.all(np.diff(error[0]) > 0)
    assert np.all(error[1] != 0)
    assert (rounded[1].dtype, error[1].dtype, error[0].dtype) == (dtype, dtype, np.int32)


def check_survival(put: Put, name: str, dtype: str, values: list[float]) -> None:
    """What was rounded arrives as it was sent."""
    wire = Wire(name)
    rounded, _ = wire.round(sparse(put, values, dtype))
    arrived = wire.unpack(wire.pack(rounded.entries), np.dtype(dtype))
    for ours, sent in zip(arrived, rounded.entries, strict=True):
        assert to_host(ours).tobytes() == to_host(sent).tobytes()


def check_nearest(put: Put, name: str, dtype: str, values: list[float]) -> None:
    """Numbers inside the range go to the nearest."""
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    inside = np.clip(np.asarray(values, np.float32), -largest, largest).astype(dtype)
    (_, rounded), _ = parts(name, sparse(put, inside, dtype))
    assert np.array_equal(rounded, nearest(inside, name))


def check_saturation(put: Put, name: str, values: list[float]) -> None:
    """Numbers beyond the range become the largest."""
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    (_, rounded), _ = parts(name, sparse(put, values))
    assert np.array_equal(rounded, np.sign(values) * largest)


def check_what_stays_behind(put: Put) -> None:
    """Where the rest could not be held, everything stays behind."""
    (_, rounded), (indices, error) = parts("float16", sparse(put, [2**30 + 128, 1, -1e30]))
    assert rounded.tolist() == [0, 1, 0]
    assert indices.tolist() == [0, 6]
    assert np.array_equal(error, np.array([2**30 + 128, -1e30], np.float32))


def check_not_finite(put: Put, name: str, dtype: str) -> None:
    """Infinity and NaN travel as they are."""
    values = [np.inf, -np.inf, np.nan, 1]
    (_, rounded), (_, error) = parts(name, sparse(put, values, dtype))
    assert np.array_equal(rounded, values, equal_nan=True)
    assert len(error) == 0


def check_entries(put: Put, name: str | None, dtype: Any, count: int) -> None:
    """An entry takes four bytes beside its value, and comes back."""
    wire, vector = Wire(name), sparse(put, np.arange(count) - 3.0, dtype)
    width = min(np.dtype(dtype).itemsize, np.dtype(FORMATS.get(name or "", dtype)).itemsize)
    message = wire.pack(vector.entries)
    indices, values = wire.unpack(message, np.dtype(dtype))
    assert message.nbytes == count * (4 + width) == count * wire.entry(np.dtype(dtype))
    assert np.array_equal(to_host(indices), to_host(vector.entries[0]))
    assert np.array_equal(to_host(values), to_host(vector.values))
    assert (indices.dtype, values.dtype) == (np.int32, dtype)

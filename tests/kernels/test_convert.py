"""Values for the wire on every backend: what the NumPy reference computes. The laws of the wire are with the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from backends import ONE_OF_EACH, assert_parity, assert_same
from devices import to_host
from inputs import NARROWING, difficult

narrowing = pytest.mark.parametrize(("name", "dtype"), NARROWING)
sizes = pytest.mark.parametrize("size", [None, 0], ids=["all", "none"])


def address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


@narrowing
@sizes
def test_narrow_and_widen(name: str, dtype: str, size: int | None) -> None:
    values = difficult(name, dtype)[:size]
    stored = reference.wire_format(name)
    expected = reference.narrow(values, name).view(stored)
    for backend in ONE_OF_EACH:
        ours, out = backend.put(values), backend.put(np.zeros(expected.nbytes + 16, np.uint8))
        with backend.active(0) as kernels:
            message = kernels.narrow(ours, name)
            assert kernels.narrow(ours, name, out=(inside := out[8:-8])) is inside
            wide = kernels.widen(message, name, np.dtype(dtype))
        assert message.dtype == np.uint8
        assert_same(to_host(message).view(stored), expected, backend.name)
        assert to_host(out).tobytes() == bytes(8) + to_host(message).tobytes() + bytes(8)
        assert_same(wide, expected.astype(dtype), backend.name)
        assert_same(ours, values)


@narrowing
@sizes
def test_round_values(name: str, dtype: str, size: int | None) -> None:
    assert_parity("round_values", difficult(name, dtype)[:size], name, on=ONE_OF_EACH)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_nothing_is_converted_to_the_format_of_the_values(name: str) -> None:
    for backend in ONE_OF_EACH:
        values = backend.put(np.array([1.5, -0.0, np.nan], name))
        with backend.active(0) as kernels:
            assert address(kernels.narrow(values, name)) == address(values)
            out = backend.put(np.zeros(values.nbytes, np.uint8))
            assert kernels.narrow(values, name, out=out) is out
            assert address(kernels.widen(out, name, values.dtype)) == address(out)
            rounded, error = kernels.round_values(values, name)
        assert to_host(out).tobytes() == to_host(values).tobytes()
        assert rounded is values
        assert to_host(error).tolist() == [0, 0, 0]

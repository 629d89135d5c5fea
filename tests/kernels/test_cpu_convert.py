"""Values for the wire against the NumPy reference: the same bits. The laws of the wire are with the collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from inputs import assert_same_bits
from wire_laws import FORMATS, NARROWING, difficult

from horovod_sparse.kernels import cpu

narrowing = pytest.mark.parametrize(("name", "dtype"), NARROWING)
same = pytest.mark.parametrize("name", ["float32", "float64"])


@narrowing
def test_narrow_and_widen(name: str, dtype: str) -> None:
    values = difficult(name, dtype)
    expected = reference.narrow(values, name)
    message, out = cpu.narrow(values, name), np.empty_like(expected)
    assert cpu.narrow(values, name, out=out) is out
    for ours in (message, out):
        assert ours.dtype == np.uint8
        assert_same_bits(ours.view(FORMATS[name]), expected.view(FORMATS[name]))
    assert_same_bits(cpu.widen(message, name, np.dtype(dtype)), reference.widen(expected, name, dtype))


@narrowing
def test_round_values(name: str, dtype: str) -> None:
    values = difficult(name, dtype)
    before = values.copy()
    for ours, expected in zip(cpu.round_values(values, name), reference.round_values(values, name), strict=True):
        assert_same_bits(ours, expected)
    assert values.tobytes() == before.tobytes()


@same
def test_nothing_is_converted_to_the_format_of_the_values(name: str) -> None:
    values = np.array([1.5, -0.0, np.nan], name)
    assert np.shares_memory(cpu.narrow(values, name), values)
    out = np.empty(values.nbytes, np.uint8)
    assert cpu.narrow(values, name, out=out).tobytes() == values.tobytes()
    assert np.shares_memory(cpu.widen(out, name, values.dtype), out)
    rounded, error = cpu.round_values(values, name)
    assert rounded is values
    assert error.tolist() == [0, 0, 0]


@narrowing
def test_of_nothing(name: str, dtype: str) -> None:
    empty = np.empty(0, dtype)
    assert cpu.narrow(empty, name).size == 0
    assert cpu.widen(np.empty(0, np.uint8), name, empty.dtype).dtype == dtype
    assert [one.dtype for one in cpu.round_values(empty, name)] == [dtype, dtype]


VALUES = np.zeros(3, np.float32)
MESSAGE = np.zeros(16, np.uint8)
F32 = np.dtype(np.float32)

REFUSED: dict[str, Any] = {
    "unknown": (lambda: cpu.narrow(VALUES, "float8"), "unknown format 'float8'; known are: float64, float32"),
    "no name": (lambda: cpu.round_values(VALUES, None), "unknown format None"),  # type: ignore[arg-type]
    "wider": (lambda: cpu.narrow(VALUES, "float64"), "format float64 is wider than values of float32"),
    "wider message": (lambda: cpu.widen(MESSAGE, "float64", F32), "format float64 is wider"),
    "wider rounding": (lambda: cpu.round_values(VALUES, "float64"), "format float64 is wider"),
    "integers": (lambda: cpu.narrow(np.zeros(3, np.int32), "float16"), "dtype int32 is neither"),
    "rounded integers": (lambda: cpu.round_values(np.zeros(3, np.int32), "float16"), "dtype int32 is neither"),
    "to float16": (lambda: cpu.widen(MESSAGE, "float16", np.dtype(np.float16)), "dtype float16 is neither"),
    "out too short": (lambda: cpu.narrow(VALUES, "float16", MESSAGE[:4]), "4 bytes are not those of 3 values"),
    "out of floats": (lambda: cpu.narrow(VALUES, "float16", VALUES), "out: dtype float32 is not uint8"),
    "out unaligned": (lambda: cpu.narrow(VALUES, "float16", MESSAGE[1:7]), "out: must be aligned to values of 2 bytes"),
    "half a value": (lambda: cpu.widen(MESSAGE[:3], "bfloat16", F32), "3 bytes are no whole number of values"),
    "message unaligned": (lambda: cpu.widen(MESSAGE[2:6], "float32", F32), "message: must be aligned to"),
    "message of floats": (lambda: cpu.widen(VALUES, "float16", F32), "message: dtype float32 is not uint8"),
    "strided": (lambda: cpu.narrow(np.zeros(6, np.float32)[::2], "float16"), "values: expected a contiguous"),
    "not flat": (lambda: cpu.round_values(VALUES[None], "float16"), "values: expected a contiguous, flat array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="values: expected a NumPy array, not <class 'list'>"):
        cpu.narrow([1.0], "float16")  # type: ignore[arg-type]

"""CuPy's own kernels, which it compiles when a variant first runs: which ones a program would launch.

The rules are those of CuPy 14: an operation on elements, a copy to another array or a fill with anything but zeros is a
kernel for each combination of dtypes and layouts; memory that is set to zero, copied between equal layouts or only
viewed needs none. Reductions and scans are counted, although CuPy has some of them precompiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np
import pytest
from cupy import _signatures


class Variant(NamedTuple):
    """One kernel that CuPy compiles."""

    operation: str
    operands: tuple[str, ...]  # dtypes, with "strided" where an array is not contiguous
    place: str  # module and line of the package


@contextmanager
def compiled() -> Iterator[set[Variant]]:
    """Provide the set of the kernels that the block would compile; only for emulated arrays."""
    found: set[Variant] = set()
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str, needs: Callable[..., bool], title: Callable[..., str] | None = None) -> None:
            original = getattr(owner, name)

            def watched(*given: Any, **named: Any) -> Any:
                result = original(*given, **named)
                if needs(result, *given):
                    found.add(Variant(title(*given) if title else name, _dtypes(*given, result), _place()))
                return result

            patch.setattr(owner, name, watched)

        for name in _signatures.methods():
            watch(cupy.ndarray, name, _is_computed)
        for name in {*_signatures.functions(), "ascontiguousarray"} - {"full", "zeros"}:
            watch(cupy, name, _is_made)
        watch(cupy, "full", lambda result, _, value, *__: not _is_memory(result, value))
        watch(cupy.ndarray, "__array_ufunc__", lambda result, *_: result.size > 0, lambda _, ufunc, *__: ufunc.__name__)
        watch(cupy.ndarray, "__getitem__", lambda _, __, at: isinstance(at, cupy.ndarray) and at.size > 0, _index)
        watch(cupy.ndarray, "__setitem__", _is_assigned, lambda x, at, _: f"{_index(x, at)} =")
        watch(cupy.ndarray, "fill", lambda _, x, value: x.size > 0 and not _is_memory(x, value))
        yield found


def _dtypes(*given: Any) -> tuple[str, ...]:
    parts = [part for x in given for part in (x if isinstance(x, (list, tuple)) else [x])]
    arrays = [part for part in parts if isinstance(part, cupy.ndarray)]
    return tuple(dict.fromkeys(f"{x.dtype}{'' if x.flags.c_contiguous else ' strided'}" for x in arrays))


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and "horovod_sparse" not in frame.f_globals["__name__"]:
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}:{frame.f_lineno}"


def _index(_: Any, at: Any) -> str:
    if not isinstance(at, cupy.ndarray):
        return "[slice]"
    return "[mask]" if at.dtype == bool else "[indices]"


def _is_computed(result: Any, x: Any, *_: Any, **__: Any) -> bool:
    return x.size > 0 and not (isinstance(result, cupy.ndarray) and np.shares_memory(result._host, x._host))


def _is_made(result: Any, first: Any, *_: Any) -> bool:
    return result is not first and getattr(result, "size", 1) > 0


def _is_assigned(_: Any, x: Any, at: Any, value: Any) -> bool:
    if isinstance(at, cupy.ndarray):
        return at.size > 0
    to = x[at]
    return to.size > 0 and not _is_memory(to, value)


def _is_memory(to: Any, value: Any) -> bool:
    """Return whether an assignment copies memory, or sets it to zero."""
    if not isinstance(value, cupy.ndarray):
        return bool(value == 0) and to.flags.c_contiguous
    same = to.dtype == value.dtype and to.shape == value.shape and to.strides == value.strides
    return bool(same and to.flags.c_contiguous)

"""Backends of the kernels: every SIMD level of the CPU, and the device. Tests run their body on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import devices  # before CuPy is imported
import numpy as np
import reference
from hypothesis import strategies as st
from inputs import Array, assert_same_bits, supported_levels, twin

from horovod_sparse.kernels import cuda, to_host


class OnHost(NamedTuple):
    """Argument that is a NumPy array on every device."""

    array: Array


class Backend:
    """Kernels of one backend, and the conversion of arrays for them.

    Args:
        level: SIMD level of the CPU; None for the device.
    """

    def __init__(self, level: str | None) -> None:
        self.level = level
        self.name = f"cpu at {level}" if level else "cuda"

    def __repr__(self) -> str:
        return self.name

    @property
    def kernels(self) -> ModuleType:
        if self.level is None:
            return cuda
        from horovod_sparse.kernels import cpu

        return cpu

    def put(self, x: Any) -> Any:
        """Return copies of arrays in the same nesting; on the CPU with the same layout."""
        if isinstance(x, OnHost):
            return x.array
        if isinstance(x, (list, tuple)):
            return x._make(map(self.put, x)) if hasattr(x, "_make") else type(x)(map(self.put, x))
        if not isinstance(x, np.ndarray):
            return x
        return twin(x) if self.level else devices.on_device(x)

    @contextmanager
    def active(self, waiting: int | None = 0) -> Iterator[ModuleType]:
        """Provide the kernels at this level; on the device, assert that they wait for it exactly ``waiting`` times.

        None: as often as they like.
        """
        if self.level is None:
            with nullcontext() if waiting is None else devices.waits(waiting):
                yield self.kernels
            return
        before = self.kernels.simd_level()
        self.kernels.use_simd(self.level)
        yield self.kernels
        self.kernels.use_simd(before)


DEVICE = [Backend(None)]
CPU = [Backend(level) for level in supported_levels()]
ALL = CPU + DEVICE
ONE_OF_EACH = CPU[:1] + DEVICE
# The emulation is slow: it runs one in four of hypothesis' examples.
SOME = st.sampled_from([ALL, CPU, CPU, CPU]) if devices.emulated() else st.just(ALL)


def assert_parity(
    name: str,
    *arguments: Any,
    on: Sequence[Backend] = ALL,
    waiting: int | None = 0,
    threads: Sequence[int] = (),
    **options: Any,
) -> Any:
    """Assert that a kernel, on all backends, returns the reference's result and leaves the same in its arguments.

    Args:
        name: Name of the kernel and of its reference.
        *arguments: Numbers and NumPy arrays, also in lists and tuples. Arrays are copied.
        on: Backends to test.
        waiting: Number of times that the kernel must wait for the device; None: any.
        threads: Numbers of kernel threads to test; the device runs with the first only.
        **options: Keyword arguments of both; arrays are copied.

    Returns:
        The reference's result.
    """
    names, before = tuple(options), tuple(options.values())
    left, left_options = Backend("reference").put((arguments, before))
    expected = getattr(reference, name)(*left, **dict(zip(names, left_options, strict=True)))
    for backend in on:
        for more in [{"threads": count} for count in (threads if backend.level else threads[:1])] or [{}]:
            ours, given = backend.put((arguments, before))
            with backend.active(waiting) as kernels:
                result = getattr(kernels, name)(*ours, **dict(zip(names, given, strict=True)), **more)
            where = f"{name} on {backend} {more or ''}"
            assert_same(result, expected, f"{where}: the result")
            assert_same(ours, left, f"{where}: what is left in the arguments")
            assert_same(given, left_options, f"{where}: what is left in the options")
    return expected


def assert_same(ours: Any, expected: Any, where: str = "") -> None:
    """Assert that nested results have the same bits; on the device, bfloat16 is represented by its bits."""
    if isinstance(expected, (list, tuple)):
        assert len(ours) == len(expected), where
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other, where)
    elif isinstance(expected, np.ndarray):
        host = to_host(ours)
        assert_same_bits(host.view(expected.dtype) if host.dtype == np.uint16 else host, expected, where)
    elif isinstance(expected, (float, np.floating)):
        assert_same_bits(np.array(ours, np.float64), np.array(expected, np.float64), where)
    else:
        assert ours == expected, where

"""Signatures of CuPy 14's functions, ufuncs and array methods; a test compares them with the installed CuPy's.

The functions do nothing but raise the TypeError that CuPy raises for arguments that it does not accept.
"""

from __future__ import annotations

from typing import Any


def _of_one(x, /, out=None, *, casting="same_kind", dtype=None): ...
def _of_two(x1, x2, /, out=None, *, casting="same_kind", dtype=None): ...


# NumPy's also accept where, order, subok and signature.
UFUNCS: dict[str, Any] = {
    **dict.fromkeys(("absolute", "invert", "negative", "signbit"), _of_one),
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power"), _of_two),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"), _of_two),
    **dict.fromkeys(("maximum", "minimum", "copysign", "left_shift", "right_shift"), _of_two),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _of_two),
}


class _Functions:
    def arange(start, stop=None, step=1, dtype=None): ...
    def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"): ...
    def cumsum(a, axis=None, dtype=None, out=None): ...
    def flatnonzero(a): ...
    def full(shape, fill_value, dtype=None, order="C"): ...

    def matmul(
        *args,
        axes=None,
        axis=None,
        keepdims=False,
        casting="same_kind",
        dtype=None,
        signature=None,
        order="K",
        out=None,
    ): ...

    def ones(shape, dtype=float, order="C"): ...
    def packbits(a, axis=None, bitorder="big"): ...
    def partition(a, kth, axis=-1): ...
    def searchsorted(a, v, side="left", sorter=None): ...
    def sort(a, axis=-1, kind=None): ...
    def unpackbits(a, axis=None, bitorder="big"): ...
    def where(condition, x=None, y=None): ...
    def zeros(shape, dtype=float, order="C"): ...


class _Methods:
    def all(self, axis=None, out=None, keepdims=False): ...
    def any(self, axis=None, out=None, keepdims=False): ...

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        refuse(casting=casting, subok=subok)

    def copy(self, order="C"): ...
    def max(self, axis=None, out=None, keepdims=False): ...
    def min(self, axis=None, out=None, keepdims=False): ...
    def ravel(self, order="C"): ...

    def repeat(self, repeats, axis=None):
        if isinstance(repeats, type(self)):
            raise ValueError("cupy.ndarray cannot be specified as `repeats` argument.")

    def reshape(self, *shape, order="C", copy=None): ...
    def sum(self, axis=None, dtype=None, out=None, keepdims=False): ...
    def view(self, dtype=None, type=None): ...


def functions() -> dict[str, Any]:
    """Functions and ufuncs of arrays, by name."""
    return {**{name: one for name, one in vars(_Functions).items() if name[0] != "_"}, **UFUNCS}


def methods() -> dict[str, Any]:
    """Methods of arrays, by name."""
    return {name: one for name, one in vars(_Methods).items() if name[0] != "_"}


def refuse(**given: Any) -> None:
    """Raise TypeError for parameters that CuPy has, but does not support."""
    for name, value in given.items():
        if value is not None:
            raise TypeError(f"{name} is not supported yet")

"""A stand-in for CuPy on machines without a GPU: arrays that refuse what CuPy's refuse, and kernels on the CPU.

Only what the package uses is here, under CuPy's names. Arrays do not turn into NumPy's by themselves and do not mix
with them; whatever would wait for the device is counted in ``transfers``. Functions, ufuncs and methods refuse
arguments that CuPy's do not take (``_signatures.py``), also those that NumPy adds when it dispatches. New memory holds
garbage, and is fenced: a kernel that writes beside an array fails the next launch.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy
from numpy import bool_, float64, uint8

from . import _signatures, _stream, cuda

__all__ = ["cuda", "ndarray"]
__version__ = "emulated"

# How often results were waited for: "get" (a copy to the host), "scalar" and "size" (of a result) and "synchronize".
transfers: dict[str, int] = {}

_FENCE = 64
_GARBAGE = 0xA5
# Of every array's memory, by its identity: the bytes between fences, and where they begin.
_fenced: dict[int, tuple[weakref.ref[numpy.ndarray], int, int]] = {}


# Memory that somebody else has, by its identity.
_foreign: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _count(what: str) -> None:
    transfers[what] = transfers.get(what, 0) + 1


def _allocate(shape: Any, kind: Any) -> numpy.ndarray:
    shape = tuple(shape) if numpy.iterable(shape) else (shape,)
    nbytes = int(numpy.prod(shape, dtype=numpy.int64)) * numpy.dtype(kind).itemsize
    _stream.mark_busy()
    memory = numpy.full(nbytes + 3 * _FENCE, _GARBAGE, uint8)
    lead = _FENCE + -memory.ctypes.data % _FENCE  # aligned as CUDA's memory is
    key = id(memory)
    _fenced[key] = weakref.ref(memory, lambda _: _fenced.pop(key, None)), lead, nbytes
    return numpy.ndarray(shape, kind, memory, lead)


def check_fences() -> None:
    """AssertionError where something was written beside an array."""
    for reference, lead, nbytes in list(_fenced.values()):
        memory = reference()
        if memory is not None:
            beside = (memory[:lead] != _GARBAGE).any() or (memory[lead + nbytes :] != _GARBAGE).any()
            assert not beside, f"a kernel wrote beside an array of {nbytes} bytes"


def _at(pointer: cuda.MemoryPointer, shape: Any, kind: Any) -> numpy.ndarray:
    """An array in memory that somebody else has, such as a tensor's; it keeps the owner."""
    memory: Any = (ctypes.c_uint8 * pointer.mem.size).from_address(pointer.ptr)
    memory.owner = pointer.mem
    _foreign[id(memory)] = memory
    return numpy.ndarray(shape, kind, memory)


def _host(x: Any) -> Any:
    """The NumPy array behind an array; nested, as in arguments."""
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, (tuple, list)):
        return type(x)(_host(one) for one in x)
    if isinstance(x, builtins.slice):
        return builtins.slice(_scalar(x.start), _scalar(x.stop), _scalar(x.step))
    if isinstance(x, numpy.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>: arrays of host and device do not mix")
    return x


def _scalar(x: Any) -> Any:
    return int(x) if isinstance(x, ndarray) else x


def _device(x: Any) -> Any:
    """A result of NumPy, as an array of the device."""
    if isinstance(x, (tuple, list)):
        return type(x)(_device(one) for one in x)
    if isinstance(x, (numpy.ndarray, numpy.generic)):
        return ndarray._wrap(numpy.asarray(x)) if _owned(x) else _copy(x)
    return x


def _owned(x: Any) -> bool:
    while getattr(x, "base", None) is not None:
        x = x.base
    return id(x) in _fenced or id(x) in _foreign


def _copy(x: Any) -> ndarray:
    x = numpy.asarray(x)
    inside = _allocate(x.shape, x.dtype)
    inside[...] = x
    return ndarray._wrap(inside)


class _Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        ctypes.memset(self.ptr, value, size)


def _as_numpy(signature: Callable[..., Any], function: Callable[..., Any], waits: bool = False) -> Callable[..., Any]:
    """A function of NumPy's on arrays of the device, with the parameters of CuPy's.

    Args:
        signature: CuPy's, which refuses other arguments.
        function: NumPy's.
        waits: Whether the result's size must be known first.
    """

    @functools.wraps(signature)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature(*args, **kwargs)
        if waits:
            _count("size")
        result = function(*map(_host, args), **{key: _host(value) for key, value in kwargs.items()})
        if (out := kwargs.get("out")) is None:
            return _device(result)
        _stream.mark_busy()
        return out

    return call


class ndarray(numpy.lib.mixins.NDArrayOperatorsMixin):
    """An array in the device's memory."""

    __slots__ = ("__weakref__", "_array")

    def __init__(self, shape: Any, dtype: Any = float64, memptr: Any = None) -> None:
        self._host = _at(memptr, shape, dtype) if memptr is not None and memptr.ptr else _allocate(shape, dtype)

    @classmethod
    def _wrap(cls, host: numpy.ndarray) -> ndarray:
        self = cls.__new__(cls)
        self._host = host
        return self

    @property
    def _host(self) -> numpy.ndarray:
        """The content, when the copies that the stream was told to make are made."""
        _stream.finish()
        return self._array

    @_host.setter
    def _host(self, array: numpy.ndarray) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _stream.interface(self._host)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        assert method == "__call__", f"CuPy's ufuncs have no {method} here"
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return _of_cupy(ufunc)(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _of_cupy(func)(*args, **kwargs)

    dtype = property(lambda self: self._array.dtype)
    shape = property(lambda self: self._array.shape)
    strides = property(lambda self: self._array.strides)
    size = property(lambda self: self._array.size)
    ndim = property(lambda self: self._array.ndim)
    nbytes = property(lambda self: self._array.nbytes)
    itemsize = property(lambda self: self._array.itemsize)
    flags = property(lambda self: self._array.flags)
    data = property(lambda self: _Pointer(self._host.ctypes.data))  # what uses it finds what the stream has done
    device = property(lambda self: cuda.Device())

    @property
    def base(self) -> ndarray | None:
        base = self._host.base
        return None if not isinstance(base, numpy.ndarray) or id(base) in _fenced else ndarray._wrap(base)

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, at: Any) -> ndarray:
        if isinstance(at, builtins.slice):
            return ndarray._wrap(self._array[_host(at)])  # a view, for which the device does nothing
        if isinstance(at, ndarray) and at.dtype == bool_:
            _count("size")
        return _device(self._host[_host(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        self._host[_host(at)] = _host(value)
        _stream.mark_busy()

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        out = numpy.empty_like(self._array) if out is None else out
        if blocking:
            _count("get")
            out[...] = self._host
            _stream.settle()
        else:
            _stream.copy(out, self._array, host=out)
        return out

    def set(self, arr: numpy.ndarray, stream: Any = None) -> None:
        assert arr.shape == self.shape
        assert arr.dtype == self.dtype
        _stream.mark_busy()
        _stream.copy(self._array, arr, host=arr)

    def fill(self, value: Any) -> None:
        self._host.fill(_host(value))
        _stream.mark_busy()

    def tolist(self) -> Any:
        _count("get")
        return self._host.tolist()

    def item(self) -> Any:
        _count("scalar")
        return self._host.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        return f"emulated {self._host!r}"


def _of_cupy(func: Any) -> Any:
    """The function that stands for one of NumPy's."""
    ours = globals().get(func.__name__)
    if ours is None:
        raise TypeError(f"no implementation found for {func.__name__} on types that implement __array_function__")
    return ours


for _name, _signature in _signatures.functions().items():
    globals()[_name] = _as_numpy(_signature, getattr(numpy, _name), waits=_name == "flatnonzero")
for _name, _signature in _signatures.methods().items():
    setattr(ndarray, _name, _as_numpy(_signature, getattr(numpy.ndarray, _name)))


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype)


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    _signatures.refuse(subok=subok)
    return ndarray(prototype.shape if shape is None else shape, dtype or prototype.dtype)


def zeros_like(a: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    result = empty_like(a, dtype, subok=subok, shape=shape)
    result.fill(0)
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    """To the device, also from the host."""
    assert order is None
    assert copy is None
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    return _copy(numpy.asarray(a, dtype))


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    return _copy(numpy.ascontiguousarray(a._host, dtype)) if not a.flags.c_contiguous else asarray(a, dtype)

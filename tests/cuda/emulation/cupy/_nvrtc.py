"""CUDA's run-time compiler: compiles CUDA C++ as C++ with the emulation's header; and launches on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy

from . import _stream

_HEADER = Path(__file__).parent.parent / "emulation.hpp"
# Products and sums are rounded separately, as NVRTC is told to; a fortified longjmp would not switch between stacks.
_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
)


class _Entry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("sizes", ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int))),
    ]


class NVRTCError(RuntimeError):
    """The compiler has refused."""


class Program:
    """What is to be compiled; the names of its kernels are kept as they are."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: list[str] = []
        self.log = ""
        self.library = b""


def createProgram(src: str, name: str, headers: tuple[str, ...], include_names: tuple[str, ...]) -> Program:
    assert not headers
    assert not include_names
    return Program(src)


def destroyProgram(prog: Program) -> None:
    del prog


def addNameExpression(prog: Program, name: str) -> int:
    prog.names.append(name)
    return 0


def getLoweredName(prog: Program, name: str) -> str:
    assert name in prog.names
    return name


def getProgramLog(prog: Program) -> str:
    return prog.log


def getCUBIN(prog: Program) -> bytes:
    return prog.library


def getVersion() -> tuple[int, int]:
    """Another one when the emulation changes."""
    about = "\0".join([_HEADER.read_text(), Path(__file__).read_text()])
    return 0, int(hashlib.sha256(about.encode()).hexdigest()[:8], 16)


def getSupportedArchs() -> tuple[int, ...]:
    return (90,)


def compileProgram(prog: Program, options: tuple[str, ...]) -> None:
    """To a library with a table of the kernels."""
    assert "--fmad=false" in options
    assert "--ftz=false" in options
    instances = ",\n".join(f'emulation::entry<&{name}>("{name}")' for name in prog.names)
    count = f"extern const int count = {len(prog.names)};"
    table = f'extern "C" {{ {count} emulation::Entry table[] = {{\n{instances}}}; }}\n'
    launch = (
        'extern "C" void launch(void (*kernel)(void**), unsigned grid, unsigned block, void** args) {\n'
        "  emulation::launch(kernel, grid, block, args);\n}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        code, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        code.write_text(f'#include "{_HEADER}"\n{prog.source}\n{table}{launch}')
        command = [os.environ.get("CXX", "g++"), *_FLAGS, str(code), "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        prog.log = run.stderr[:4000]
        if run.returncode:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        prog.library = built.read_bytes()


class Module:
    """Kernels that were compiled."""

    def load(self, cubin: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(cubin)
            file.flush()
            library = ctypes.CDLL(file.name)
        count = ctypes.c_int.in_dll(library, "count").value
        entries = (_Entry * count).in_dll(library, "table")
        self._kernels = {entry.name.decode(): _Kernel(entry.name.decode(), library, entry) for entry in entries}

    def get_function(self, name: str) -> _Kernel:
        return self._kernels[name]


class _Kernel:
    def __init__(self, name: str, library: ctypes.CDLL, entry: _Entry) -> None:
        self._name, self._launch, self._run = name, library.launch, entry.run
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
        sizes = (ctypes.c_int * max(entry.count, 1))()
        entry.sizes(sizes)
        self._sizes = list(sizes)[: entry.count]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0
    ) -> None:
        import cupy

        _stream.mark_busy()
        assert len(args) == len(self._sizes), f"{self._name} takes {len(self._sizes)} arguments, not {len(args)}"
        assert 0 < grid[0] < 2**31, (self._name, grid)
        assert block[0] in range(32, 1025, 32), (self._name, block)
        values = [self._bytes(i, arg, cupy.ndarray) for i, arg in enumerate(args)]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        self._launch(self._run, grid[0], block[0], pointers)
        cupy.check_fences()

    def _bytes(self, position: int, arg: Any, ndarray: type) -> Any:
        """An argument as CuPy would pass it."""
        if isinstance(arg, ndarray):
            value = numpy.array([arg.data.ptr], numpy.uint64)
        else:
            assert isinstance(arg, numpy.generic), f"{self._name}: argument {position} needs a NumPy scalar: {arg!r}"
            value = numpy.array([arg])
        expected = self._sizes[position]
        assert value.itemsize == expected, (
            f"{self._name}: argument {position} has {value.itemsize} bytes, not {expected}"
        )
        return value

"""Detection of CUDA-aware MPI. MPI without CUDA support crashes on GPU pointers."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from pathlib import Path

from horovod_sparse.transport.subprocess_python import run_python

VARIABLE = "HOROVOD_SPARSE_CUDA_AWARE"

_PROBE_SECONDS = 120.0
# Short and long messages take different code paths in MPI.
_PROBE = """
import sys
import cupy
from mpi4py import MPI

with cupy.cuda.Device(int(sys.argv[1])):
    for size in (1, 1 << 20):
        sent, received = cupy.full(size, 7, "u1"), cupy.zeros(size, "u1")
        cupy.cuda.get_current_stream().synchronize()
        MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0, 0)
        if (received.get() != 7).any():
            sys.exit(f"wrong data arrived in a message of {size} bytes")
"""


@functools.cache
def cuda_aware() -> bool:
    """Return whether CuPy arrays are passed to MPI directly. Decided once per process, after MPI has been initialized.

    The environment variable HOROVOD_SPARSE_CUDA_AWARE is "1", "0" or "auto". The default, "auto", queries the MPI
    library. "1" is verified in a subprocess, on the current device.

    Raises:
        RuntimeError: The variable is "1", but MPI cannot send GPU arrays.
        ValueError: The variable has another value.
    """
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in ("0", "1", "auto"):
        raise ValueError(f"{VARIABLE} must be 0, 1 or auto, not {setting!r}")
    if setting == "1" and (reason := _why_not()):
        raise RuntimeError(
            f"{VARIABLE} is 1, but this MPI cannot send arrays in GPU memory: {reason}. Set it to 0 or unset it to "
            "send messages through host memory, or use an MPI that was built with CUDA"
        )
    return setting == "1" or (setting == "auto" and bool(ask_library()))


def ask_library() -> bool | None:
    """Return whether the MPI library reports CUDA support; None: it cannot be queried. MPI must be initialized."""
    for library in mpi_libraries():
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return None


def mpi_libraries() -> list[str]:
    """Return the MPI libraries that this process has loaded, without C++ and Fortran bindings."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    pattern = re.compile(r"/libmpi(?!_?cxx|_mpifh|_use|fort)[^/]*[.]so[.0-9]*$")
    return sorted({os.path.realpath(name) for name in mapped if pattern.search(name)})


@functools.cache
def _why_not() -> str:
    """Return why a subprocess failed to send GPU memory; empty: it succeeded."""
    device = importlib.import_module("cupy").cuda.Device().id
    status, output = run_python(["-c", _PROBE, str(device)], _PROBE_SECONDS)
    if status == 0:
        return ""
    ended = f"no result within {_PROBE_SECONDS:g} s" if status is None else f"a test ended with status {status}"
    lines = output.strip().splitlines()
    return ended + (f" ({lines[-1].strip()})" if lines else "")

"""Support of MPI for arrays in the memory of a GPU. One without it does not say no to them: the process crashes."""

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
# Short messages and long ones take different ways through MPI.
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
            sys.exit(f"of {size} bytes, others arrived than were sent")
"""


@functools.cache
def cuda_aware() -> bool:
    """Tells whether CuPy arrays are given to MPI as they are. Decided once in a process, after MPI was initialized.

    The environment variable HOROVOD_SPARSE_CUDA_AWARE says "1" or "0"; "auto", the default, asks the MPI library. What
    "1" says is tried out in a process of its own, on the current device.

    Raises:
        RuntimeError: It says "1", but MPI cannot send such arrays.
        ValueError: It says something else.
    """
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in ("0", "1", "auto"):
        raise ValueError(f"{VARIABLE} must be 0, 1 or auto, not {setting!r}")
    if setting == "1":
        _try_out()
    return setting == "1" or (setting == "auto" and bool(ask_library()))


def ask_library() -> bool | None:
    """The MPI library's answer whether it takes GPU pointers; None where it gives none. MPI must be initialized."""
    for library in mpi_libraries():
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return None


def mpi_libraries() -> list[str]:
    """The MPI libraries that this process has loaded, without their companions for C++ and Fortran."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    pattern = re.compile(r"/libmpi(?!_?cxx|_mpifh|_use|fort)[^/]*[.]so[.0-9]*$")
    return sorted({os.path.realpath(name) for name in mapped if pattern.search(name)})


def _try_out() -> None:
    reason = _why_not()
    if reason:
        raise RuntimeError(
            f"{VARIABLE} is 1, but this MPI cannot send arrays in a GPU's memory: {reason}. Set it to 0 or unset it: "
            "messages then go through the host's memory. Or use an MPI that was built with CUDA"
        )


@functools.cache
def _why_not() -> str:
    """The reason why a GPU's memory cannot be sent, as a process of its own finds out; empty where it can."""
    device = importlib.import_module("cupy").cuda.Device().id
    status, output = run_python(["-c", _PROBE, str(device)], _PROBE_SECONDS)
    if status == 0:
        return ""
    ended = f"no answer within {_PROBE_SECONDS:g} s" if status is None else f"a try ended with status {status}"
    lines = output.strip().splitlines()
    return ended + (f" ({lines[-1].strip()})" if lines else "")

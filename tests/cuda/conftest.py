"""Where there is no GPU, a stand-in for CuPy takes its place: the same tests run on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from pathlib import Path


def has_gpu() -> bool:
    """Whether CUDA's driver finds a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


collect_ignore = []
if importlib.util.find_spec("horovod") is None:
    collect_ignore += ["test_optimizer.py"]
if not has_gpu():
    sys.path.insert(0, str(Path(__file__).parent / "emulation"))
    # Not among what CuPy keeps of the user.
    os.environ["CUPY_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"horovod_sparse_emulation_{os.getuid()}")
    import cupy  # noqa: F401

    # These need a real device: its streams, its allocator, its graphs.
    collect_ignore += ["test_on_gpu.py"]

"""Probes of this machine: each imports one component and returns facts about it.

An import may fail, abort the process (MPI) or hang (file system, driver). `run_all` therefore runs every probe in a
separate process, which executes this file by its path. At the top it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def probe_torch() -> Facts:
    """Return the version of torch, its CUDA version, and whether it sees a GPU and has `torch.distributed`."""
    torch = import_module("torch")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "sees_gpu": torch.cuda.is_available(),
        "distributed": import_module("torch.distributed").is_available(),
    }


def probe_horovod() -> Facts:
    """Return the features that Horovod was built with, and the MPI libraries that it and mpi4py load."""
    version = import_module("horovod").__version__
    hvd = import_module("horovod.torch")
    facts = {name: bool(getattr(hvd, f"{name}_built")()) for name in ("mpi", "gloo", "nccl")}
    import_module("mpi4py").rc.initialize = False
    import_module("mpi4py.MPI")
    return {
        "version": version,
        **facts,
        "libraries": import_module("horovod_sparse.transport.cuda_aware").mpi_libraries(),
    }


def probe_mpi() -> Facts:
    """Return facts about the MPI library of mpi4py, started as a single process."""
    mpi4py, mpi = import_module("mpi4py"), import_module("mpi4py.MPI")
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {
        "mpi4py": mpi4py.__version__,
        "version": re.split(r",|\n", mpi.Get_library_version().strip())[0].strip(),
        "standard": ".".join(map(str, mpi.Get_version())),
        "thread_level": next(name for name in levels if getattr(mpi, f"THREAD_{name}") == mpi.Query_thread()),
        "cuda_aware": import_module("horovod_sparse.transport.cuda_aware").ask_library(),
    }


def probe_kernels() -> Facts:
    """Return the instruction set that the compiled kernels use."""
    return {"simd": import_module("horovod_sparse.kernels.cpu").simd_level()}


def probe_cupy() -> Facts:
    """Return the version of CuPy and the number of devices that it sees."""
    cupy = import_module("cupy")
    return {"version": cupy.__version__, "devices": cupy.cuda.runtime.getDeviceCount()}


def probe_gpu() -> Facts:
    """Return the GPUs that the driver reports, independent of Python packages."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"devices": done.stdout.strip().splitlines()}


_PROBES = (probe_torch, probe_horovod, probe_mpi, probe_kernels, probe_cupy, probe_gpu)
PROBES: dict[str, Callable[[], Facts]] = {probe.__name__.removeprefix("probe_"): probe for probe in _PROBES}


def run_all(timeout: float) -> dict[str, Facts]:
    """Run all probes, each for at most `timeout` seconds.

    Returns:
        The facts of each probe by name; {"error": reason} for a probe that failed.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(PROBES, pool.map(partial(run, timeout=timeout), PROBES), strict=True))


def run(name: str, timeout: float) -> Facts:
    """Run one probe in a separate process; return its facts, or {"error": reason}."""
    # Not at the top: the probe process cannot import it there.
    from horovod_sparse.transport.subprocess_python import run_python

    status, output = run_python([__file__, name], timeout)
    return {"error": f"no answer within {timeout:g} s"} if status is None else _answer(output, status)


def _answer(output: str, status: int) -> Facts:
    """Return the facts in the last line of a probe's output, or the reason why there are none."""
    lines = output.strip().splitlines()
    try:
        facts: Facts = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"the process ended with status {status}" + (f": {lines[-1]}" if lines else "")}
    return facts


def _main(name: str) -> None:
    # Imports must not find the modules in this file's folder, but must find the package in a checkout.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    sys.path.append(str(here.parents[1]))
    try:
        facts = PROBES[name]()
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(facts))


if __name__ == "__main__":
    _main(sys.argv[1])

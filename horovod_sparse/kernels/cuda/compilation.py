"""Compilation of CUDA C++ at first use, with a cache on disk for later processes.

This module calls NVRTC directly: CuPy's RawModule adds -ftz=true, which flushes subnormal numbers to zero, so results
would differ from the CPU's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cupy
from cupy.cuda import nvrtc

# Products and sums are rounded separately, as in NumPy and the CPU kernels.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

_LOG = logging.getLogger("horovod_sparse")
_SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def source(name: str) -> str:
    """Return the source of a file in csrc/cuda with its included headers expanded, each once."""
    seen: set[Path] = set()

    def read(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = path.read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: read((path.parent / match[1]).resolve()), text)

    return read((_SOURCES / f"{name}.cu").resolve())


class Compiled(NamedTuple):
    """Compiled code for one architecture.

    Attributes:
        names: Lowered names of the kernels, in the order requested.
        code: A cubin, or PTX if NVRTC does not know the architecture.
    """

    names: list[str]
    code: bytes


def load(name: str, kernels: Sequence[str]) -> dict[str, Any]:
    """Load the kernels of a file on the current device and return them by name.

    Args:
        name: Name of the file in csrc/cuda, without its suffix.
        kernels: Names of the kernels, with namespace and template arguments.

    Raises:
        RuntimeError: The code does not compile.
    """
    compiled = cached(name, kernels, cupy.cuda.Device().compute_capability)
    module = cupy.cuda.Module()
    module.load(compiled.code)
    return {kernel: module.get_function(lowered) for kernel, lowered in zip(kernels, compiled.names, strict=True)}


def compile_for(arch: str, name: str, kernels: Sequence[str]) -> Compiled:
    """Compile a file, as ``load``, for a compute capability such as "90"; requires neither a GPU nor a driver."""
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        target = _target(arch)
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={target}"))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"{name}.cu does not compile for {target}: {error}\n{log}") from error
        code = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
        return Compiled([nvrtc.getLoweredName(program, kernel) for kernel in kernels], code)
    finally:
        nvrtc.destroyProgram(program)


def _target(arch: str) -> str:
    """Return NVRTC's target; the driver translates PTX for a device that is newer than NVRTC."""
    known = nvrtc.getSupportedArchs()
    if int(arch) in known:
        return f"sm_{arch}"
    older = [known_arch for known_arch in known if known_arch < int(arch)]
    if not older:
        raise RuntimeError(
            f"this device has compute capability {arch}, but NVRTC {nvrtc.getVersion()} compiles for {min(known)} and "
            "newer only: install the CuPy package for an older CUDA"
        )
    return f"compute_{max(older)}"


# --- cache ---------------------------------------------------------------------------------------------------------


def cached(name: str, kernels: Sequence[str], arch: str) -> Compiled:
    """Return the code from the cache; if it is not there, compile it and add it."""
    what = [source(name), *kernels, *OPTIONS, arch, str(nvrtc.getVersion())]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")  # CuPy's
    path = folder / f"horovod_sparse_{name}_{key}.cubin"
    compiled = _read(path)
    if compiled is None:
        compiled = compile_for(arch, name, kernels)
        try:
            _write(path, compiled)
        except OSError as error:  # works without a cache, but every process compiles
            _LOG.warning(
                "cannot cache compiled kernels in %s (%s): set CUPY_CACHE_DIR to a writable folder", path, error
            )
    return compiled


def _read(path: Path) -> Compiled | None:
    """Return the content of a cache file, or None if it is missing or damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        return Compiled(about["names"], code) if about["sha256"] == hashlib.sha256(code).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Write a temporary file and rename it, as several ranks may write at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"names": compiled.names, "sha256": hashlib.sha256(compiled.code).hexdigest()}
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(about).encode() + b"\n" + compiled.code)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""Compiles CUDA C++ when it is first used, and keeps what comes of it for the next process.

With CUDA's run-time compiler itself: CuPy's RawModule adds -ftz=true, which makes zeros of subnormal numbers, and the
bits would not be the CPU's.
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

# Products and sums are rounded separately, as NumPy does it and the CPU kernels.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

_LOG = logging.getLogger("horovod_sparse")
_SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def source(name: str) -> str:
    """A file of csrc/cuda with the headers it includes in their places."""
    seen: set[Path] = set()

    def read(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = path.read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: read((path.parent / match[1]).resolve()), text)

    return read((_SOURCES / f"{name}.cu").resolve())


class Compiled(NamedTuple):
    """Code for one architecture.

    Attributes:
        names: The kernels' names in the code, in the order in which they were asked for.
        code: cubin, or PTX for an architecture that the compiler does not know.
    """

    names: list[str]
    code: bytes


def load(name: str, kernels: Sequence[str]) -> dict[str, Any]:
    """The kernels of a file as functions on the current device, by their names.

    Args:
        name: Of the file in csrc/cuda, without its ending.
        kernels: Their names, with namespace and template arguments.

    Raises:
        RuntimeError: The code does not compile.
    """
    compiled = _kept(name, kernels, cupy.cuda.Device().compute_capability)
    module = cupy.cuda.Module()
    module.load(compiled.code)
    return {kernel: module.get_function(there) for kernel, there in zip(kernels, compiled.names, strict=True)}


def compile_for(arch: str, name: str, kernels: Sequence[str]) -> Compiled:
    """Compiles a file; needs neither a GPU nor a driver.

    Args:
        arch: Compute capability, such as "90".
        name: As for ``load``.
        kernels: As for ``load``.

    Raises:
        RuntimeError: The code does not compile.
    """
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
    """Target of the compiler; a device that is newer than the compiler translates PTX itself."""
    known = nvrtc.getSupportedArchs()
    if int(arch) in known:
        return f"sm_{arch}"
    older = [one for one in known if one < int(arch)]
    if not older:
        raise RuntimeError(
            f"this device has compute capability {arch}, but CUDA's run-time compiler {nvrtc.getVersion()} compiles "
            f"for {min(known)} and newer ones: install the CuPy for an older CUDA"
        )
    return f"compute_{max(older)}"


# --- what was compiled before --------------------------------------------------------------------------------------


def _kept(name: str, kernels: Sequence[str], arch: str) -> Compiled:
    """Code that the cache holds; compiled and put there if it holds nothing."""
    what = [source(name), *kernels, *OPTIONS, arch, str(nvrtc.getVersion())]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()
    path = _folder() / f"horovod_sparse_{name}_{key}.cubin"
    compiled = _read(path)
    if compiled is None:
        compiled = compile_for(arch, name, kernels)
        try:
            _write(path, compiled)
        except OSError as error:  # it works without, but every process compiles for itself
            _LOG.warning(
                "kernels cannot be kept in %s (%s): set CUPY_CACHE_DIR to a folder that is writable", path, error
            )
    return compiled


def _folder() -> Path:
    """The folder that CuPy uses."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _read(path: Path) -> Compiled | None:
    """A file's content; None where it is missing or damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        return Compiled(about["names"], code) if about["sha256"] == hashlib.sha256(code).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, compiled: Compiled) -> None:
    """Writes a file beside and renames it: many ranks may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"names": compiled.names, "sha256": hashlib.sha256(compiled.code).hexdigest()}
    handle, beside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(about).encode() + b"\n" + compiled.code)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise

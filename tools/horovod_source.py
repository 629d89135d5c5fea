"""Horovod's source package: download, unpacking, and corrections for the build."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

from environment import InstallError, pip

VERSION = "0.28.1"

# File, old text, new text.
Correction = tuple[str, str, str]

# The headers of torch need C++17.
_STANDARD = [("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")]

# Debug information takes a quarter of the compile time, and the file that takes longest by far is compiled last.
_FASTER_BUILD = [
    ("CMakeLists.txt", '"-O2" "-O3" CMAKE_CXX_FLAGS_REL', '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_REL'),
    ("horovod/torch/CMakeLists.txt", "SHARED ${SOURCES} ${PYTORCH_SOURCES})", "SHARED ${PYTORCH_SOURCES} ${SOURCES})"),
]

# If any nvcc is found, CMake enables CUDA and the CUDA build of torch requires it, even if no operations on GPUs were
# requested and the rest of the toolkit is missing. No variable hides an nvcc from either of them.
_WITHOUT_CUDA = [
    ("CMakeLists.txt", "enable_language(CUDA)", ""),
    ("cmake/Modules/FindPytorch.cmake", 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)', 'set(Pytorch_CUDA "FALSE")'),
]

# Most of the compile time goes into the headers of some thirty small files. Not tested with operations on GPUs.
_LIBRARY = 'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES PREFIX "")'
_TOGETHER = """
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/torch/mpi_ops_v2.cc"
                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
"""
_UNITY = [("horovod/torch/CMakeLists.txt", _LIBRARY, _LIBRARY + _TOGETHER)]


def corrections(environ: Mapping[str, str]) -> list[Correction]:
    """Return the corrections for a build with these variables, without CUDA unless they enable operations on GPUs."""
    gpu = any(value and name.startswith("HOROVOD_GPU_") for name, value in environ.items())
    always = _STANDARD + _FASTER_BUILD
    return always if gpu else always + _WITHOUT_CUDA + _UNITY


def unpack(folder: Path) -> Path:
    """Download the source package into `folder`, unpack it there, and return the folder of the source.

    Raises:
        InstallError: pip cannot download the package.
    """
    options = ["--no-deps", "--no-build-isolation", "--no-binary=horovod"]
    try:
        pip("download", *options, "--dest", folder, f"horovod=={VERSION}")
    except InstallError as error:
        remedy = f"set PIP_FIND_LINKS to a folder with horovod-{VERSION}.tar.gz."
        raise InstallError(f"{error}\nIf no index has Horovod's source package, {remedy}") from error
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        # Python before 3.11.4 has no filters. pip, which has already unpacked this archive, refuses unsafe paths too.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / f"horovod-{VERSION}"


def correct(source: Path, changes: list[Correction]) -> None:
    """Apply the corrections to the unpacked source.

    Raises:
        InstallError: An old text does not occur exactly once: the corrections were made for another source.
    """
    for file, old, new in changes:
        path = source / file
        text = path.read_text() if path.exists() else ""
        if text.count(old) != 1:
            raise InstallError(
                f"{file} has {old!r} {text.count(old)} times instead of once: this is not Horovod {VERSION} as "
                "published. Check the indexes that pip uses (pip config list) for another package of that name."
            )
        path.write_text(text.replace(old, new))

"""Horovod's source package, downloaded, unpacked and corrected for its build."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

from environment import InstallError, pip

VERSION = "0.28.1"

# File, text, and the text that takes its place.
Correction = tuple[str, str, str]

# torch's headers need C++17.
_STANDARD = [("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")]

# A quarter of the compiler's time is debug information, and the file that takes longest by far comes last.
_FASTER_BUILD = [
    ("CMakeLists.txt", '"-O2" "-O3" CMAKE_CXX_FLAGS_REL', '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_REL'),
    ("horovod/torch/CMakeLists.txt", "SHARED ${SOURCES} ${PYTORCH_SOURCES})", "SHARED ${PYTORCH_SOURCES} ${SOURCES})"),
]

# Wherever some nvcc is found, CMake enables CUDA and torch's CUDA build asks for it, even where nobody asked for
# operations on GPUs and the rest of the toolkit is missing. No variable hides an nvcc from either of them.
_WITHOUT_CUDA = [
    ("CMakeLists.txt", "enable_language(CUDA)", ""),
    ("cmake/Modules/FindPytorch.cmake", 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)', 'set(Pytorch_CUDA "FALSE")'),
]

# Most of the compiler's time goes by in the headers of some thirty small files. Not tried with operations on GPUs.
_LIBRARY = 'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES PREFIX "")'
_TOGETHER = """
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/torch/mpi_ops_v2.cc"
                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
"""
_UNITY = [("horovod/torch/CMakeLists.txt", _LIBRARY, _LIBRARY + _TOGETHER)]


def corrections(environ: Mapping[str, str]) -> list[Correction]:
    """The corrections for a build with these variables: CUDA is left out unless operations on GPUs are asked for."""
    gpu = any(value and name.startswith("HOROVOD_GPU_") for name, value in environ.items())
    always = _STANDARD + _FASTER_BUILD
    return always if gpu else always + _WITHOUT_CUDA + _UNITY


def unpack(folder: Path) -> Path:
    """Downloads the source package into `folder` and unpacks it there; returns the source's own folder.

    Raises:
        InstallError: pip finds no such package.
    """
    options = ["--no-deps", "--no-build-isolation", "--no-binary=horovod"]
    try:
        pip("download", *options, "--dest", folder, f"horovod=={VERSION}")
    except InstallError as error:
        remedy = f"set PIP_FIND_LINKS to a folder with horovod-{VERSION}.tar.gz."
        raise InstallError(f"{error}\nWhere no index has Horovod's source package, {remedy}") from error
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        # Python before 3.11.4 has no filters; pip, which has unpacked the same archive before, refuses such paths too.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / f"horovod-{VERSION}"


def correct(source: Path, changes: list[Correction]) -> None:
    """Makes the changes in the unpacked source.

    Raises:
        InstallError: a text is not there exactly once: the source is not the one that the corrections were made for.
    """
    for file, old, new in changes:
        path = source / file
        text = path.read_text() if path.exists() else ""
        if text.count(old) != 1:
            raise InstallError(
                f"{file} has {old!r} {text.count(old)} times instead of once: this is not Horovod {VERSION} as "
                "published. Look for another package of that name where pip is configured to look (pip config list)."
            )
        path.write_text(text.replace(old, new))

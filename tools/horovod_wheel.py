"""Build and cache of Horovod's wheel for the environment's torch and MPI."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from environment import PREFIX, InstallError, cache_folder, last_lines, path_with, pip, say
from horovod_source import VERSION, correct, corrections, unpack
from mpi_stack import Mpi

# Horovod's setup.py imports or requires these; without build isolation they must be installed before.
_BUILD_REQUIREMENTS = [
    "setuptools",
    "wheel",
    "cmake>=3.16",
    "packaging",
    "cffi",
    "pyyaml",
    "psutil",
    "cloudpickle",
]

_FRAMEWORKS = {"PYTORCH": True, "MPI": True, "TENSORFLOW": False, "MXNET": False, "GLOO": False}

_ERROR = re.compile(r"CMake Error|fatal error:|: error:|^ERROR:|\*\*\* .* Error \d")

_REMEDIES = {
    "Killed signal": "The compiler ran out of memory: set MAKEFLAGS=-j1 (make: JOBS=1).",
    "No space left on device": "The disk is full: free some space or set TMPDIR.",
    "Could NOT find MPI": "CMake did not find MPI: `mpicxx` must be on PATH with its headers.",
    "Python.h": "Python's headers are missing: install python3-dev (or python3-devel).",
}


def options(environ: dict[str, str]) -> dict[str, str]:
    """Return the HOROVOD_* variables of the build: those of the user, and defaults for the others."""
    chosen = {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}
    for framework, wanted in _FRAMEWORKS.items():
        names = (f"HOROVOD_WITH_{framework}", f"HOROVOD_WITHOUT_{framework}")
        if not any(name in chosen for name in names):
            chosen[names[0] if wanted else names[1]] = "1"
    return dict(sorted(chosen.items()))


def wheel_folder(mpi: Mpi) -> Path:
    """Return the folder of the wheel for this environment; its name is a digest of all that the binary depends on.

    A library inside the environment enters the digest with its relative path, at which the wheel finds it in every
    environment.
    """
    facts = {
        "horovod": VERSION,
        "torch": _torch_version(),
        "python": sysconfig.get_config_var("SOABI"),
        "mpi": [str(_place(mpi)), mpi.version],
        "options": options(dict(os.environ)),
        "corrections": corrections(os.environ),
        "compiler": os.environ.get("CXX", ""),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "horovod" / digest


def find_wheel(folder: Path) -> Path | None:
    """Return the wheel in a folder of the cache, or None if it was not built yet."""
    return next(folder.glob("horovod-*.whl"), None)


def build_wheel(mpi: Mpi, folder: Path) -> Path:
    """Build the wheel into `folder` and return its path.

    Raises:
        InstallError: The build failed; the message holds lines of the log, its path and a remedy.
    """
    pip("install", *_BUILD_REQUIREMENTS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    env = build_environment(mpi)
    say(f"building Horovod {VERSION} with {mpi.mpicxx} ({env['MAKEFLAGS']}), which takes some minutes; log: {log}")
    start = time.monotonic()
    # Built in a temporary folder of the cache and then renamed: the cache never holds an incomplete wheel.
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        source = unpack(Path(temporary))
        correct(source, corrections(os.environ))
        with log.open("w") as output:
            done = subprocess.run(build_command(source, scratch), env=env, stdout=output, stderr=output, check=False)
        if done.returncode != 0:
            raise InstallError(_explain(log))
        built = next(Path(scratch).glob("horovod-*.whl"))
        folder.mkdir(exist_ok=True)
        wheel = built.replace(folder / built.name)
    say(f"built in {time.monotonic() - start:.0f} s")
    return wheel


def build_environment(mpi: Mpi) -> dict[str, str]:
    """Return the environment variables of the build; variables that the user has set are kept."""
    env = {**os.environ, **options(dict(os.environ))}
    env["PATH"] = path_with(mpi.mpicxx.parent)
    if not _place(mpi).is_absolute():
        # Precedes the folders that CMake adds, so that a process loads the MPI of the environment with the wheel.
        prefix = os.path.relpath(PREFIX, Path(sysconfig.get_path("platlib"), "horovod", "torch"))
        env["LDFLAGS"] = f"-Wl,-rpath,'$ORIGIN/{prefix}/{_place(mpi).parent}' {env.get('LDFLAGS', '')}"
    # FindMPI looks here first, so that it does not choose among several MPIs of the machine.
    env.setdefault("MPI_HOME", str(mpi.mpicxx.parent.parent))
    # CMake 4 refuses the minimum version of the Gloo in Horovod's package (HOROVOD_WITH_GLOO=1).
    env.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
    if not env.get("MAKEFLAGS"):
        env["MAKEFLAGS"] = f"-j{_jobs()}"
    return env


def build_command(source: Path, folder: str) -> list[str]:
    """Return the command that builds the wheel of the unpacked `source` into `folder`."""
    # Without pip's cache: it does not know that the wheel depends on torch and MPI.
    flags = ["--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    return [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", folder, str(source)]


def _place(mpi: Mpi) -> Path:
    """Return the library's path: relative to this environment's folder if it is inside, else absolute."""
    prefix = PREFIX.resolve()
    return mpi.library.relative_to(prefix) if mpi.library.is_relative_to(prefix) else mpi.library


def _jobs() -> int:
    """Return the number of compilers: one per core, with 2 GiB for each, as the headers of torch are large."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory >> 31))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(f"torch is missing. Run: {sys.executable} -m pip install torch") from None


def _explain(log: Path) -> str:
    text = log.read_text(errors="replace")
    remedies = [remedy for sign, remedy in _REMEDIES.items() if sign in text]
    remedy = " ".join(remedies) or "Fix the problem that these lines name."
    return f"Building Horovod failed. From {log}:\n{_error_lines(text)}\n{remedy} Then run this again."


def _error_lines(text: str) -> str:
    """Return the lines around the first error; the log ends with the clean-up of pip, which does not help."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 25)
    return last_lines("\n".join(lines[max(0, first - 5) : first + 25]))

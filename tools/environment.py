"""The Python environment that the installer changes: that of the running interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PREFIX = Path(sys.prefix)
SCRIPTS = Path(sysconfig.get_path("scripts"))


class InstallError(RuntimeError):
    """A problem that the user must fix; the message names it and the remedy."""


def check_writable() -> None:
    """Check that packages can be installed.

    Raises:
        InstallError: The interpreter belongs to the system; the user needs an environment.
    """
    packages = sysconfig.get_path("purelib")
    if not os.access(packages, os.W_OK):
        raise InstallError(
            f"{packages} is not writable. Make an environment and run its Python: {sys.executable} -m venv .venv"
        )


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"[install] {message}", flush=True)


def cache_folder() -> Path:
    """Return the cache folder that environments share ($XDG_CACHE_HOME, by default ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "horovod_sparse"


def path_with(*folders: Path) -> str:
    """Return the search path, preceded by `folders` and the environment's scripts."""
    return os.pathsep.join([*map(str, folders), str(SCRIPTS), os.environ.get("PATH", os.defpath)])


def output_of(*command: str | Path, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """Run a command and return its output.

    Raises:
        InstallError: The command failed or took longer than `timeout` seconds; the message ends with its last lines.
    """
    line = " ".join(map(str, command))
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=env,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{line}: {error}") from error
    if done.returncode != 0:
        raise InstallError(f"{line} ended with status {done.returncode}:\n{last_lines(done.stdout)}")
    return done.stdout


def last_lines(text: str) -> str:
    """Return the last 30 lines of `text`, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-30:])


def pip(*arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Run pip in this environment.

    Raises:
        InstallError: The environment has no pip, or pip failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip --upgrade")
    output_of(sys.executable, "-m", "pip", *arguments, env=env, timeout=3600)

"""The Python environment that the installer works on: the running interpreter's own."""

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
    """Something the user has to put right; the message names it and the remedy."""


def check_writable() -> None:
    """Checks that packages can be installed.

    Raises:
        InstallError: the interpreter belongs to the system; the user needs an environment.
    """
    packages = sysconfig.get_path("purelib")
    if not os.access(packages, os.W_OK):
        raise InstallError(
            f"{packages} is not writable. Make an environment and run its Python: {sys.executable} -m venv .venv"
        )


def say(message: str) -> None:
    """Prints one line of progress."""
    print(f"[install] {message}", flush=True)


def cache_folder() -> Path:
    """The folder for what is worth keeping between environments ($XDG_CACHE_HOME, by default ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "horovod_sparse"


def path_with(*folders: Path) -> str:
    """The search path with `folders` and the environment's own scripts in front."""
    return os.pathsep.join([*map(str, folders), str(SCRIPTS), os.environ.get("PATH", os.defpath)])


def output_of(*command: str | Path, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """Runs a command and returns what it printed.

    Raises:
        InstallError: the command failed or took longer than `timeout` seconds; with its last lines.
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


def last_lines(text: str, count: int = 30) -> str:
    """The last `count` lines of `text`, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-count:])


def pip(*arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Runs pip in this environment.

    Raises:
        InstallError: the environment has no pip, or pip failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip --upgrade")
    output_of(sys.executable, "-m", "pip", *arguments, env=env, timeout=3600)

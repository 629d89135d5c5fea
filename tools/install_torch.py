#!/usr/bin/env python3
"""Installs torch into the environment of the Python that runs this file, unless one is there.

Usage: install_torch.py [ARGUMENTS OF PIP INSTALL]

The build that pip chooses by default brings CUDA, some 3 GB. Where no NVIDIA driver is found and no arguments ask
for anything else, the CPU build is taken, some 200 MB, if it can be had.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import InstallError, output_of, pip, say

TORCH = "torch==2.13.0"

# Of the question whether there is a CPU build: no answer must not be waited for.
_HASTE = {"UV_HTTP_CONNECT_TIMEOUT": "3", "UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}


def main(arguments: list[str]) -> int:
    """Installs torch; returns the exit status."""
    if any(importlib.metadata.distributions(name="torch")):
        return 0
    if not arguments and not has_driver() and install_cpu_build():
        return 0
    return subprocess.call([sys.executable, "-m", "pip", "install", *(arguments or [TORCH])])


def has_driver() -> bool:
    """An NVIDIA driver's presence: its device, its program or its library."""
    return bool(Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") or ctypes.util.find_library("cuda"))


def install_cpu_build() -> bool:
    """Installs the CPU build by uv, which knows its index; returns False where it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{folder}/bin/uv", "pip", "install", "--python", sys.executable, "--torch-backend=cpu", TORCH]
        try:
            pip("install", "--no-deps", "--only-binary=uv", "--target", folder, "uv")
            output_of(*command, "--dry-run", env={**os.environ, **_HASTE}, timeout=20)
        except InstallError:
            say("no index with torch's CPU build is in reach: pip chooses the build")
            return False
        say("no NVIDIA driver: installing torch's CPU build")
        return subprocess.call(command) == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

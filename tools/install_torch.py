#!/usr/bin/env python3
"""Installer of torch for the environment of the Python that runs this file; does nothing if torch is installed.

Usage: install_torch.py [ARGUMENTS OF PIP INSTALL]

By default, pip chooses a build with CUDA, about 3 GB. Without an NVIDIA driver and without arguments, this script
installs the CPU build instead, about 200 MB, if it is available.
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

# For the check whether a CPU build is available: without an answer, it must end soon.
_SHORT_TIMEOUTS = {"UV_HTTP_CONNECT_TIMEOUT": "3", "UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}


def main(arguments: list[str]) -> int:
    """Install torch and return the exit status."""
    if any(importlib.metadata.distributions(name="torch")):
        return 0
    if not arguments and not has_driver() and install_cpu_build():
        return 0
    return subprocess.call([sys.executable, "-m", "pip", "install", *(arguments or [TORCH])])


def has_driver() -> bool:
    """Return whether an NVIDIA driver is present, by its device, its program or its library."""
    return bool(Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") or ctypes.util.find_library("cuda"))


def install_cpu_build() -> bool:
    """Install the CPU build with uv, which knows its index; return False if the build is not available."""
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{folder}/bin/uv", "pip", "install", "--python", sys.executable, "--torch-backend=cpu", TORCH]
        try:
            pip("install", "--no-deps", "--only-binary=uv", "--target", folder, "uv")
            output_of(*command, "--dry-run", env={**os.environ, **_SHORT_TIMEOUTS}, timeout=20)
        except InstallError:
            say("no index with torch's CPU build is reachable: pip chooses the build")
            return False
        say("no NVIDIA driver: installing torch's CPU build")
        return subprocess.call(command) == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

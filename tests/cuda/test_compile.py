"""Every kernel compiles for every architecture that is supported, without a GPU, and ahead of the first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = "from horovod_sparse.kernels.cuda import precompile; precompile.main([{arch!r}])"
# What is in the cache is read: this process cannot compile.
READ = "from horovod_sparse.kernels.cuda import compilation; compilation.compile_for = None; " + COMPILE
MODULES = {"coding", "convert", "quantize", "select", "sketch", "statistics", "vectors"}


@pytest.mark.full
@pytest.mark.parametrize(
    "arch", ["90", *(pytest.param(arch, marks=pytest.mark.nightly) for arch in ("70", "80", "100"))]
)
def test_kernels_compile_ahead(arch: str, tmp_path: Path) -> None:
    """With the real CuPy, in a new process, as this one may have the emulation."""
    for program in (COMPILE, READ):
        run = subprocess.run(
            [sys.executable, "-c", program.format(arch=arch)],
            env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert run.returncode == 0, run.stderr
        assert {line.split()[0] for line in run.stdout.splitlines()} == MODULES
        files = list(tmp_path.glob("horovod_sparse_*.cubin"))
        assert len(files) == len(MODULES)
        assert all(file.stat().st_size > 1000 for file in files)

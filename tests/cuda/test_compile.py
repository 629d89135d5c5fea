"""Every kernel compiles for every architecture that is supported, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
from horovod_sparse.kernels import cuda
from horovod_sparse.kernels.cuda.compilation import compile_for
from horovod_sparse.kernels.cuda.launch import MODULES

sizes = {}
for module in MODULES:
    compiled = compile_for(sys.argv[1], module.name, module.kernels)
    assert len(set(compiled.names)) == len(module.kernels), compiled.names
    sizes[module.name] = len(compiled.code)
print(json.dumps(sizes))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "arch", ["90", *(pytest.param(arch, marks=pytest.mark.nightly) for arch in ("70", "80", "100"))]
)
def test_kernels_compile(arch: str) -> None:
    """With the real CuPy, in a process of its own: this one may have the stand-in."""
    run = subprocess.run([sys.executable, "-c", COMPILE, arch], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    sizes = json.loads(run.stdout)
    assert all(size > 1000 for size in sizes.values())
    assert set(sizes) == {"coding", "convert", "quantize", "select", "sketch", "statistics", "vectors"}

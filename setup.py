"""Declares the compiled extension; everything else about the package is in pyproject.toml."""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# Products and sums are rounded separately (NumPy's bits), so they must not be contracted into an FMA. The SIMD
# level is chosen at run time: a build for the login node's CPU must also run on the compute nodes.
cpu = Pybind11Extension(
    "horovod_sparse.kernels._cpu",
    sorted(map(str, Path("csrc/cpu").rglob("*.cpp"))),
    include_dirs=["csrc/cpu"],
    depends=sorted(map(str, Path("csrc").rglob("*.hpp"))),
    cxx_std=17,
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
)
# With what the tests force and ask of select (csrc/cpu/select/hooks.hpp).
if os.environ.get("HOROVOD_SPARSE_TEST_HOOKS") == "1":
    cpu.define_macros.append(("HOROVOD_SPARSE_TEST_HOOKS", "1"))

ParallelCompile(default=0).install()  # a file on each core: setuptools compiles one after the other
setup(ext_modules=[cpu])

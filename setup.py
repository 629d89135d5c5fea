"""Build of the compiled extension; all other settings of the package are in pyproject.toml."""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# Products and sums must not be contracted into FMAs: they are rounded separately, like NumPy's. The SIMD level is
# chosen at run time, so that a build on the login node also runs on the compute nodes.
cpu = Pybind11Extension(
    "horovod_sparse.kernels._cpu",
    sorted(map(str, Path("csrc/cpu").rglob("*.cpp"))),
    include_dirs=["csrc/cpu"],
    depends=sorted(map(str, Path("csrc").rglob("*.hpp"))),
    cxx_std=17,
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
)
# Adds the hooks for tests of select (csrc/cpu/select/hooks.hpp).
if os.environ.get("HOROVOD_SPARSE_TEST_HOOKS") == "1":
    cpu.define_macros.append(("HOROVOD_SPARSE_TEST_HOOKS", "1"))

ParallelCompile(default=0).install()  # one file per core; setuptools alone compiles serially
setup(ext_modules=[cpu])

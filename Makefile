# One command per task; `make help` lists them. Settings of the tools are in pyproject.toml.

VENV ?= .venv
PYTHON ?= python3
# torch for an environment that has none. Where pip would choose a build with CUDA (gigabytes), pip's options may
# follow the version, for example --index-url with the index of the CPU builds.
TORCH ?= torch==2.13.0
# Compilers at a time for building Horovod; empty: one per core, as far as memory allows.
JOBS ?=
# Where every combination is tried, and the slow tests run: see tests/laws.py.
THOROUGH_RANKS ?= 3
RANKS ?= 1 2
LAW_RANKS ?= 4 5 7 8 16
# Of the tests of the CUDA backend, where they are emulated.
EMULATED_RANKS ?= 3
# Processes that share the tests that need one process.
WORKERS ?= 2

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.horovod_sparse
# The environment's programs first: ninja, cmake, horovodrun and mpirun (the machine's mpirun where it has MPI).
export PATH := $(BIN):$(PATH)
SOURCES := $(filter-out tools/mpitest.py,$(wildcard pyproject.toml setup.py tools/*.py tools/cxx17)) \
           $(shell find csrc -type f 2>/dev/null)
# Files with laws import neither torch nor horovod: the other test files are not even collected at 5 ranks and more.
LAWS = $(shell grep -rlE --include='test_*.py' 'mark\.law' --exclude-dir=cuda tests)

# Every kernel, on small inputs.
SANITIZED = tests/cuda -m 'not mpi' --ignore tests/cuda/test_on_gpu.py --ignore tests/cuda/test_emulation.py \
            --ignore tests/cuda/test_compile.py --ignore tests/cuda/test_benchmark.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test lint types test-serial test-mpi test-cuda test-slurm docs bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make the environment (VENV=.venv): torch, MPI, Horovod, this package

# make's own MAKEFLAGS must not reach the build of Horovod, which takes its number of jobs from there.
$(STAMP): $(SOURCES)
	@tools/toolchain.sh '$(PYTHON)' '$(CXX)' '$(abspath $(VENV))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	env -u MFLAGS MAKEFLAGS='$(JOBS:%=-j%)' $(BIN)/python tools/install_horovod.py
	$(BIN)/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.13'
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train on digits with 4 ranks, dense and sparse, and compare them (runs/demo)
	tools/demo.sh

test: lint types test-serial test-mpi  ## everything that CI runs

lint: $(STAMP)  ## style
	ruff check
	ruff format --check

types: $(STAMP)  ## types, strictly
	mypy

test-serial: $(STAMP)  ## the tests that need one process
	python -m pytest -n $(WORKERS) --dist worksteal -m 'not mpi'

test-mpi: $(STAMP)  ## the tests under mpirun, at 1 to 3 ranks; the laws at 4, 5, 7, 8 and 16 too
	python tools/mpitest.py --ranks $(THOROUGH_RANKS) -- -m mpi --ignore tests/cuda tests
	python tools/mpitest.py --ranks $(RANKS) -- -m 'mpi and not slow' --ignore tests/cuda tests
	python tools/mpitest.py --ranks $(EMULATED_RANKS) -- -m mpi tests/cuda
	python tools/mpitest.py --ranks $(LAW_RANKS) -- -m 'mpi and law' $(LAWS)

test-cuda:  ## on a GPU: the same bits, ranks that share it, memcheck and racecheck (needs no Horovod, no venv)
	$(PYTHON) -m pytest tests/cuda -m 'not mpi'
	$(PYTHON) tools/mpitest.py --ranks 2 3 4 -- -m mpi tests/cuda
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q -x $(SANITIZED)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) -m pytest -q -x $(SANITIZED)

test-slurm: $(STAMP)  ## the scripts of slurm/ on a SLURM of its own (as root it installs Debian's packages)
	tests/slurm/install.sh
	python -m pytest tests/slurm --slurm

docs: $(STAMP)  ## the documentation, in docs/_build
	python -m sphinx -W --keep-going -b html docs docs/_build

bench: $(STAMP)  ## the benchmarks of the kernels (about two minutes)
	python -m benchmarks.select
	python -m benchmarks.sparsifiers --sizes 25M
	python -m benchmarks.error_compressors

clean:  ## remove what was built, keep the environment and runs/
	rm -rf build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find horovod_sparse -name '*.so' -delete
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -f $(STAMP)

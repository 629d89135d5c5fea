# One command per task; `make help` lists them. Settings of the tools are in pyproject.toml.

VENV ?= .venv
PYTHON ?= python3
# torch for an environment that has none, as arguments of pip install; empty: see tools/install_torch.py.
TORCH ?=
# Compilers at a time for building Horovod; empty: one per core, as far as memory allows.
JOBS ?=
# World sizes of laws on threads, beside 3, at which every combination is tried: see tests/laws.py.
LAW_RANKS ?= 1,2,4,5,7,8,16
# Those of all laws in `make test-ci`; one of them is chosen by the hash of the commit.
COMMIT := $(shell git rev-parse --short=7 HEAD 2>/dev/null || echo 0)
CI_LAW_RANKS ?= 2,4,$(word $(shell echo $$((0x$(COMMIT) % 4 + 1))),5 7 8 16)
# World size of the tests under mpirun in `make test`.
RANKS ?= 2
# Tests of `make test`, and those of them under mpirun.
QUICK = not full and not nightly
OTHERS = mpi and not slow and $(QUICK)
# What the wheel must install on: here, systems with glibc 2.34 (RHEL 9, Ubuntu 22.04, Debian 12) and later ones.
PLATFORM ?= manylinux_2_34_$(shell uname -m)
# Processes that share the tests that need one process; some only wait.
WORKERS ?= 3

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.horovod_sparse
TOOLS := $(VENV)/.horovod_sparse_dev
# The environment's programs first: ninja, cmake, horovodrun and mpirun (the machine's mpirun where it has MPI).
export PATH := $(BIN):$(PATH)
SOURCES := $(filter-out tools/mpitest.py tools/demo%,$(wildcard pyproject.toml setup.py tools/*.py)) \
           $(shell find csrc -type f 2>/dev/null)
# Files with laws import neither torch nor horovod. Other files are not even collected, which would take as long as the
# tests: every rank would do it.
marked = $(sort $(shell grep -rl --include='test_*.py' 'mark\.$(1)' $(2)))
LAWS = $(call marked,law,--exclude-dir=cuda tests)
UNDER_MPIRUN = $(call marked,mpi,tests)
FRONT_ENDS = $(patsubst %,tests/frontends/test_%.py,ddp optimizer scripts)
# Each file in one process, so that its fixtures are made once. (loadgroup of pytest-xdist 3.8 does nothing with
# pytest 9.2.)
SERIAL = python -m pytest -n $(WORKERS) --dist loadfile
MPITEST = python tools/mpitest.py

# Tests whose bodies run on every device, and every kernel on small inputs.
ON_DEVICES = tests/cuda tests/kernels tests/transport tests/collectives tests/wire tests/costs
SANITIZED = tests/cuda tests/kernels -m 'not mpi and $(QUICK)' --ignore tests/kernels/test_cpu.py \
            --ignore tests/cuda/test_on_gpu.py --ignore tests/cuda/test_emulation.py --ignore tests/cuda/test_benchmark.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test test-ci test-nightly lint types test-serial test-laws test-mpi test-cuda test-slurm docs wheel bench \
        clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make the environment (VENV=.venv): torch, MPI, Horovod, this package

# make's own MAKEFLAGS must not reach the build of Horovod, which takes its number of jobs from there.
$(STAMP): $(SOURCES)
	@tools/toolchain.sh '$(PYTHON)' '$(CXX)' '$(abspath $(VENV))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py $(TORCH)
	env -u MFLAGS MAKEFLAGS='$(JOBS:%=-j%)' $(BIN)/python tools/install_horovod.py
	$(BIN)/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.13'
	HOROVOD_SPARSE_TEST_HOOKS=1 $(BIN)/python -m pip install --quiet --no-build-isolation \
	  --editable '.[examples,horovod]'
	@touch $@

# What only tests, docs and packages need; the package itself is installed, so that pip adds what the extra asks for.
$(TOOLS): $(STAMP)
	$(BIN)/python -m pip install --quiet 'horovod_sparse[dev]'
	@touch $@

demo: $(STAMP)  ## train dense, fp16 and sparse, on 4 nodes with slow links and on this machine (runs/demo)
	python -m tools.demo

test: lint types test-serial test-laws test-mpi  ## lint, types, laws at 1 to 16 ranks, front ends at 2

test-ci: $(TOOLS)  ## what CI adds to `make test`: tests marked full, more ranks
	$(SERIAL) -m 'not mpi and full and not nightly'
	$(SERIAL) --ranks $(CI_LAW_RANKS) -m 'law and not mpi and $(QUICK)' $(LAWS)
	$(MPITEST) --ranks 3 -- -m '(mpi or law) and not nightly' $(sort $(UNDER_MPIRUN) $(LAWS))
	$(MPITEST) --ranks 1 -- -m '$(OTHERS)' $(UNDER_MPIRUN)
	$(MPITEST) --ranks 4 -- -m '(mpi or law) and not slow and $(QUICK)' $(FRONT_ENDS) tests/transport

test-nightly: $(TOOLS)  ## what must pass before a release: kills at random, packages, every architecture, up to 16 ranks
	$(SERIAL) -m 'not mpi and nightly'
	$(MPITEST) --ranks 3 -- -m 'mpi and nightly' $(call marked,nightly,$(UNDER_MPIRUN))
	$(SERIAL) --ranks $(LAW_RANKS) -m 'law and not mpi' $(LAWS)

lint: $(TOOLS)  ## style
	ruff check
	ruff format --check

types: $(TOOLS)  ## types, strictly
	mypy

test-serial: $(TOOLS)  ## the tests that need one process
	$(SERIAL) -m 'not mpi and $(QUICK)'

test-laws: $(TOOLS)  ## transport and collectives at other world sizes than 3, on threads
	python -m pytest -n $(WORKERS) --ranks $(LAW_RANKS) -m 'law and not mpi and $(QUICK)' \
	  -k 'test_base or nothing_is_lost' tests/transport/test_base.py tests/collectives/test_laws.py

test-mpi: $(TOOLS)  ## the tests under mpirun; the transport at 3 ranks, where messages of devices are tried, too
	$(MPITEST) --ranks 3 -- -m '(mpi or law) and $(QUICK)' tests/transport
	$(MPITEST) --ranks $(RANKS) -- -m '$(OTHERS)' $(UNDER_MPIRUN)

test-cuda:  ## on a GPU: the same bits, ranks that share it, memcheck and racecheck (needs no Horovod, no venv)
	$(PYTHON) -m pytest $(ON_DEVICES) -m 'not mpi and $(QUICK)'
	$(PYTHON) tools/mpitest.py --ranks 2 3 4 -- -m '(mpi or law) and $(QUICK)' $(filter-out tests/cuda,$(ON_DEVICES))
	$(PYTHON) tools/mpitest.py --ranks 2 3 4 -- -m mpi tests/cuda
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q -x $(SANITIZED)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) -m pytest -q -x $(SANITIZED)

test-slurm: $(TOOLS)  ## the scripts of slurm/ on a SLURM of its own (as root it installs Debian's packages)
	tests/slurm/install.sh
	python -m pytest tests/slurm --slurm

docs: $(TOOLS)  ## the documentation, in docs/_build
	python -m sphinx -W --keep-going -b html docs docs/_build

# Built from the source package, so that nothing of an earlier build gets in. The tag is the oldest that the binary fits.
wheel: $(TOOLS)  ## the packages in dist: the source, and a wheel that needs no compiler to install
	rm -rf build/packages
	env -u HOROVOD_SPARSE_TEST_HOOKS python -m build --no-isolation --outdir build/packages
	auditwheel repair --plat '$(PLATFORM)' --wheel-dir dist build/packages/*.whl || \
	  { echo "The wheel does not fit $(PLATFORM): build it where compiler and glibc are older, such as in the image" \
	         "of manylinux_2_28, or allow a newer one, as in: make wheel PLATFORM=manylinux_2_39_x86_64" >&2; exit 1; }
	mv build/packages/*.tar.gz dist/

bench: $(STAMP)  ## the benchmarks of the kernels (about two minutes)
	python -m benchmarks.kernels.selection
	python -m benchmarks.kernels.sparsifiers --sizes 25M
	python -m benchmarks.kernels.errors

clean:  ## remove what was built, keep the environment and runs/
	rm -rf build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find horovod_sparse -name '*.so' -delete
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -f $(STAMP) $(TOOLS)

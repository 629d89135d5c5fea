# `make help` lists the targets. The settings of the tools are in pyproject.toml.

VENV ?= .venv
PYTHON ?= python3
# Arguments of pip install for torch, if the environment has none; empty: see tools/install_torch.py.
TORCH ?=
# Number of concurrent compilers for the build of Horovod; empty: one per core, limited by memory.
JOBS ?=
# World sizes of the tests marked `law` on threads, in addition to 3, which runs every combination: see tests/laws.py.
LAW_RANKS ?= 1,2,4,5,7,8,16
# World size of the tests under mpirun in `make test`.
RANKS ?= 3
# The tests of `make test`, and the subset under mpirun.
QUICK = not full and not nightly
OTHERS = mpi and not slow and $(QUICK)
# Oldest systems for the wheel; by default those with glibc 2.34 (RHEL 9, Ubuntu 22.04, Debian 12).
PLATFORM ?= manylinux_2_34_$(shell uname -m)
# Processes that run the single-process tests, some of which only wait.
WORKERS ?= 3

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.horovod_sparse
TOOLS := $(VENV)/.horovod_sparse_dev
# The environment's programs come first: ninja, cmake, horovodrun and mpirun (the machine's mpirun if it has MPI).
export PATH := $(BIN):$(PATH)
# Else each of the thousands of processes that the tests start would compile this package and the tests again.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := $(filter-out tools/mpitest.py tools/release.py tools/demo%,$(wildcard pyproject.toml setup.py tools/*.py)) \
           $(shell find csrc -type f 2>/dev/null)
# Files with tests marked `law` import neither torch nor horovod. Other files are not collected: on every rank, that
# would take as long as the tests.
marked = $(sort $(shell grep -rl --include='test_*.py' 'mark\.$(1)' $(2)))
LAWS = $(call marked,law,--exclude-dir=cuda tests)
UNDER_MPIRUN = $(call marked,mpi,tests)
# Their tests under mpirun in `make test`: the transports and a file of each front end. Those of the rest in CI.
CORE = $(sort $(wildcard tests/transport/test_*.py)) $(patsubst %,tests/frontends/test_%.py,optimizer ddp fsdp rounds)
REST = $(filter-out $(CORE),$(UNDER_MPIRUN))
# Files that are run at a second world size: 1 and 2, and the fewest with replicas of shards.
OF_ANY = $(patsubst %,tests/frontends/test_%.py,arrays ddp fsdp local_sgd optimizer scripts)
OF_SHARDS = $(patsubst %,tests/frontends/test_%.py,fsdp local_shards sharded streaming)
# Tests of the transport over torch.distributed.
OF_TORCH = $(addprefix tests/transport/test_,base.py doubling.py nodes.py in_process.py torch_distributed.py)
# Each file runs in one process, so that its fixtures are created once, in the order of tests/conftest.py. (loadgroup of
# pytest-xdist 3.8 has no effect with pytest 9.2.)
SERIAL = python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 3
MPITEST = python tools/mpitest.py

CUDA = cuda-check cuda-tests cuda-sanitize cuda-bench cuda-figure

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-ci test-nightly lint types test-serial test-laws test-mpi test-torchrun test-slurm \
        docs wheel release bench clean $(CUDA)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## create the environment (VENV=.venv) with torch, MPI, Horovod and this package

# This make's MAKEFLAGS must not reach the build of Horovod, which takes its number of jobs from that variable.
$(STAMP): $(SOURCES)
	@tools/toolchain.sh '$(PYTHON)' '$(CXX)' '$(abspath $(VENV))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py $(TORCH)
	env -u MFLAGS MAKEFLAGS='$(JOBS:%=-j%)' $(BIN)/python tools/install_horovod.py
	$(BIN)/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.13'
	HOROVOD_SPARSE_TEST_HOOKS=1 $(BIN)/python -m pip install --quiet --no-build-isolation \
	  --editable '.[examples,horovod]'
	@touch $@

# Dependencies of tests, docs and packages only; the package is installed already, so pip adds those of the extra.
$(TOOLS): $(STAMP)
	$(BIN)/python -m pip install --quiet 'horovod_sparse[dev]'
	@touch $@

demo: $(STAMP)  ## compare dense, fp16 and sparse training on 4 nodes with slow links and on this machine (runs/demo)
	python -m tools.demo

# In pairs, of which one leaves cores idle.
test: $(TOOLS)  ## run lint, types, single-process tests, laws at 1 to 16 ranks, front ends at 3
	$(MAKE) lint
	$(MAKE) --jobs=2 types test-serial
	$(MAKE) --jobs=2 test-laws test-torchrun
	$(MAKE) test-mpi

# With SLURM=1, test-ci and test-nightly run those on a private SLURM, too, so that no core is idle while a job waits.
test-ci: $(TOOLS)  ## run what CI adds to `make test`: tests marked full, more world sizes
	$(SERIAL) -m 'not mpi and full and not nightly' $(SLURM:%=tests tests/slurm --slurm)
	$(MPITEST) --ranks 3 --limit 2400 -- -m 'mpi and not nightly' $(REST)
	$(MPITEST) --ranks 3 -- -m '(mpi and (slow or full) or law and $(QUICK)) and not nightly' $(CORE) \
	  tests/collectives/test_laws.py
	$(MPITEST) --ranks 1 2 -- -m '$(OTHERS)' $(OF_ANY)
	$(MPITEST) --ranks 2 -- -m mpi -k 'FSDP2 or sharded' tests/frontends/test_situations.py
	$(MPITEST) --ranks 4 -- -m '$(OTHERS)' -k 'not test_memories' $(OF_SHARDS)
	$(MPITEST) --torchrun --ranks 4 -- -m '$(OTHERS)' tests/frontends/test_local_shards.py
	for part in check tests sanitize bench figure; do python -m tools.gpu.hour $$part --output runs/gpu || exit 1; done

test-nightly: $(TOOLS)  ## run what a release must pass: random kills, packages, every architecture, up to 16 ranks
	$(SERIAL) -m 'not mpi and nightly' $(SLURM:%=tests tests/slurm --slurm)
	$(MPITEST) --ranks 3 --limit 7200 -- -m 'law' $(LAWS)
	$(MPITEST) --ranks 3 -- -m 'mpi and nightly' $(call marked,nightly\|halved,$(UNDER_MPIRUN))
	$(MPITEST) --ranks 1 2 4 --limit 7200 -- -m '$(OTHERS)' $(UNDER_MPIRUN)
	$(MPITEST) --ranks 8 -- -m '$(OTHERS)' $(patsubst %,tests/frontends/test_%.py,rounds streaming local_sgd)
	$(MPITEST) --torchrun --ranks 1 3 4 -- -m '(mpi or law) and $(QUICK)' $(OF_TORCH) tests/collectives/test_laws.py \
	  $(patsubst %,tests/frontends/test_%.py,ddp situations streaming local_shards)
	$(MPITEST) --torchrun --ranks 2 -- -m mpi -k 'FSDP2 or sharded' tests/frontends/test_situations.py
	$(SERIAL) --ranks $(LAW_RANKS) -m 'law and not mpi' $(LAWS)

lint: $(TOOLS)  ## check style
	ruff check
	ruff format --check

types: $(TOOLS)  ## check types strictly
	mypy

test-serial: $(TOOLS)  ## run the single-process tests
	$(SERIAL) -m 'not mpi and $(QUICK)'

test-laws: $(TOOLS)  ## test transport and collectives on threads, at world sizes other than 3
	python -m pytest -n $(WORKERS) --ranks $(LAW_RANKS) -m 'law and not mpi and $(QUICK)' \
	  -k 'test_base or test_nodes or nothing_is_lost' tests/transport/test_base.py tests/transport/test_nodes.py \
	  tests/collectives/test_laws.py

test-mpi: $(TOOLS)  ## run transports and front ends at 3 ranks under mpirun
	$(MPITEST) --ranks $(RANKS) -- -m '(mpi or law) and not slow and $(QUICK)' $(CORE)

test-torchrun: $(TOOLS)  ## run transports and DDP at 3 ranks under torchrun
	$(MPITEST) --torchrun --ranks $(RANKS) -- -m '(mpi or law) and $(QUICK)' $(OF_TORCH) tests/frontends/test_ddp.py

cuda-check:  ## GPU: show in three minutes what fails first (needs no Horovod and no venv)
cuda-tests:  ## GPU: compare bits with the CPU's, with 1, 2 and 3 ranks that share the GPU, and with all GPUs
cuda-sanitize:  ## GPU: run every kernel under memcheck, racecheck, initcheck and synccheck
cuda-bench:  ## GPU: time selection and whole steps, and count the kernels' memory traffic
cuda-figure:  ## GPU: measure and draw the parts of a step of VGG-16
$(CUDA): cuda-%:
	$(PYTHON) -m tools.gpu.hour $* --output runs/gpu

test-slurm: $(TOOLS)  ## test the scripts of slurm/ on a private SLURM (as root, installs Debian's packages)
	tests/slurm/install.sh
	python -m pytest -n $(WORKERS) tests/slurm --slurm --durations 10

docs: $(TOOLS)  ## build the documentation in docs/_build
	python -m sphinx -W --keep-going -b html docs docs/_build

# Built from the source package, so that it contains nothing of an earlier build. The tag is the oldest that fits.
wheel: $(TOOLS)  ## build the packages in dist: source, and a wheel that installs without a compiler
	rm -rf build/packages
	env -u HOROVOD_SPARSE_TEST_HOOKS python -m build --no-isolation --outdir build/packages
	auditwheel repair --plat '$(PLATFORM)' --wheel-dir dist build/packages/*.whl || \
	  { echo "The wheel does not fit $(PLATFORM): build it where compiler and glibc are older, such as in the image" \
	         "of manylinux_2_28, or allow a newer one, as in: make wheel PLATFORM=manylinux_2_39_x86_64" >&2; exit 1; }
	mv build/packages/*.tar.gz dist/

release: $(TOOLS)  ## check version, changelog, tag and packages of a release; run test-nightly last
	python tools/release.py
	rm -rf dist
	$(MAKE) wheel
	python tools/release.py --packages
	$(MAKE) test-nightly

bench: $(STAMP)  ## run the benchmarks of the kernels (about two minutes)
	python -m benchmarks.kernels.selection
	python -m benchmarks.kernels.sparsifiers --sizes 25M --ranks 8,64
	python -m benchmarks.kernels.errors

clean:  ## remove build results, keep the environment and runs/
	rm -rf build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find horovod_sparse -name '*.so' -delete
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -f $(STAMP) $(TOOLS)

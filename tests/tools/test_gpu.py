"""tools/gpu/setup.sh prepares the shell of a GPU machine; prepare.sh, which needs a network, is checked for syntax."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tools" / "gpu"
# `.` and not `bash FILE`: the variables must be there afterwards.
SOURCE = f". {FOLDER}/setup.sh && env"

pytestmark = pytest.mark.full


def source(where: Path, prefix: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPU_PREFIX": str(prefix), "PYTHON": sys.executable, "LD_LIBRARY_PATH": ""}
    return subprocess.run(
        ["bash", "-c", SOURCE], cwd=where, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The root of a repository with .gpu, with empty files instead of compiled ones."""
    root = tmp_path / "root"
    for name in (".gpu/wheels/none", ".gpu/kernels/horovod_sparse_select_1.cubin", ".gpu/_cpu.cpython-312.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "horovod_sparse" / "kernels").mkdir(parents=True)
    return root


@pytest.mark.parametrize("name", ["prepare.sh", "setup.sh"])
def test_syntax(name: str) -> None:
    assert subprocess.run(["bash", "-n", FOLDER / name], timeout=60).returncode == 0


def test_without_the_package_there_is_a_remedy(tmp_path: Path) -> None:
    run = source(tmp_path, tmp_path / "prefix")
    assert run.returncode != 0
    assert "run tools/gpu/prepare.sh" in run.stderr


@pytest.mark.parametrize("between", ["", "local/"], ids=["usual", "debian"])
def test_the_shell_finds_what_is_installed(package: Path, tmp_path: Path, between: str) -> None:
    prefix = tmp_path / "prefix"
    mpi, site = prefix / between, prefix / between / "lib/python3.12/site-packages"
    (site / "pytest_mpi").mkdir(parents=True)
    (mpi / "bin").mkdir()
    (mpi / "bin" / "mpirun").touch()
    (prefix / "installed").touch()
    run = source(package, prefix)
    assert run.returncode == 0, run.stderr
    found = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
    root = str(prefix / between).rstrip("/")
    assert found["OPAL_PREFIX"] == root
    assert found["LD_LIBRARY_PATH"] == f"{root}/lib"
    assert found["MPI4PY_LIBMPI"] == f"{root}/lib/libmpi.so.40"
    assert found["PATH"].startswith(f"{root}/bin:")
    assert found["PYTHONPATH"].split(":") == [str(package / one) for one in ("", "tests", "tools", "examples")] + [
        str(site)
    ]
    assert (Path(found["CUPY_CACHE_DIR"]) / "horovod_sparse_select_1.cubin").is_file()
    assert (package / "horovod_sparse" / "kernels" / "_cpu.cpython-312.so").is_file()

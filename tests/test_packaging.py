"""The source package carries the kernels' sources, and a wheel built from it works without the repository."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTENSION = "horovod_sparse/kernels/_cpu."

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The source package and the wheel built from it; made from a copy, so that the repository stays clean."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    leave = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__", "_build")
    shutil.copytree(ROOT, source, symlinks=True, ignore=leave)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def names_in_sdist(packages):
    with tarfile.open(packages[0]) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def names_in_wheel(packages):
    return set(zipfile.ZipFile(packages[1]).namelist())


def test_the_source_package_has_every_source_what_a_developer_needs_and_nothing_built(packages):
    names = names_in_sdist(packages)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {Path(name).suffix for name in sources} == {".hpp", ".cpp", ".cu", ".cuh"}
    expected = {"LICENSE", "README.md", "Makefile", "setup.py", "pyproject.toml", "tests/conftest.py"}
    installer = {f"tools/{name}" for name in ("install_horovod.py", "install_torch.py", "toolchain.sh", "demo.sh")}
    assert sources | expected | installer <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_wheel_has_the_extension_the_types_and_the_licence(packages):
    names = names_in_wheel(packages)
    assert [name for name in names if name.startswith(EXTENSION) and name.endswith(".so")]
    assert "horovod_sparse/py.typed" in names
    # CUDA's kernels are compiled where they run.
    folder = "horovod_sparse/kernels/csrc"
    code = {f"{folder}/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc/cuda").iterdir()}
    assert code | {f"{folder}/common/portable.hpp"} <= names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_wheel_has_the_package_and_nothing_beside_it(packages):
    names = names_in_wheel(packages)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "horovod_sparse").rglob("*.py")}
    assert modules <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"horovod_sparse"}


def test_the_wheel_works_where_the_repository_is_not(packages, tmp_path):
    zipfile.ZipFile(packages[1]).extractall(tmp_path)
    program = "import horovod_sparse.kernels.cpu as cpu; print(cpu.__file__, cpu.simd_level())"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, level = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert level in {"avx512", "avx2", "portable"}

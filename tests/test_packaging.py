"""The source package contains the kernel sources; its wheel needs neither the repository nor a compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from stubs import put_program

ROOT = Path(__file__).parents[1]
EXTENSION = "horovod_sparse/kernels/_cpu."

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Source package and the wheel built from it, made from a copy to keep the repository clean."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    leave = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__", "_build")
    shutil.copytree(ROOT, source, symlinks=True, ignore=leave)
    done = make_wheel(source, sys.prefix, HOROVOD_SPARSE_TEST_HOOKS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(source.glob("dist/*.tar.gz")), next(source.glob("dist/*.whl"))


def make_wheel(source, venv, **variables):
    """Run `make wheel` in a copy of the repository, with an environment that make does not build."""
    command = ["make", "wheel", f"VENV={venv}", "-o", f"{venv}/.horovod_sparse_dev"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        command, cwd=source, env={**environment, **variables}, capture_output=True, text=True, check=False
    )


def test_the_source_package_has_all_sources_and_nothing_built(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {Path(name).suffix for name in sources} == {".hpp", ".cpp", ".cu", ".cuh"}
    expected = {"LICENSE", "README.md", "Makefile", "setup.py", "pyproject.toml", "tests/conftest.py", "CITATION.cff"}
    installer = {f"tools/{name}" for name in ("install_horovod.py", "install_torch.py", "toolchain.sh", "demo.py")}
    assert sources | expected | installer <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_wheel_has_package_extension_types_and_licence_only(packages):
    names = set(zipfile.ZipFile(packages[1]).namelist())
    assert [name for name in names if name.startswith(EXTENSION) and name.endswith(".so")]
    assert "horovod_sparse/py.typed" in names
    # CUDA kernels are compiled at run time.
    folder = "horovod_sparse/kernels/csrc"
    code = {f"{folder}/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc/cuda").iterdir()}
    assert code | {f"{folder}/common/portable.hpp"} <= names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "horovod_sparse").rglob("*.py")}
    assert modules <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"horovod_sparse"}


@pytest.fixture(scope="module")
def installed(packages, tmp_path_factory):
    """Provide a function that runs a program in a fresh environment with wheel and dependencies, but no compiler."""
    venv = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--no-deps", "--no-index"]
    environment = {"PATH": str(venv / "bin"), "HOME": str(venv)}
    subprocess.run([*pip, packages[1]], env=environment, check=True)
    paths = {"base": str(venv), "platbase": str(venv)}
    own = Path(sysconfig.get_path("purelib", vars=paths))
    packages_here = [path for path in sys.path if path.endswith("-packages")]
    (own / "dependencies.pth").write_text("\n".join(packages_here))

    def run(program, *arguments):
        command = [venv / "bin" / program, *arguments]
        return subprocess.run(command, cwd=venv, env=environment, capture_output=True, text=True, check=True).stdout

    run.folder = own
    return run


def test_the_wheel_installs_and_works_without_a_compiler(installed):
    program = "import horovod_sparse.kernels._cpu as cpu; print(cpu.__file__, cpu.simd_level(), hasattr(cpu, 'force'))"
    file, level, hooks = installed("python", "-c", program).split()
    assert Path(file).is_relative_to(installed.folder)
    assert level in {"avx512", "avx2", "portable"}
    assert hooks == "False"  # test hooks are excluded even if the variable requests them


def test_the_command_of_the_wheel_works(installed):
    assert "advise" in installed("horovod-sparse", "--help")
    network = ["--parameters", "25.6M", "--ranks", "64", "--bandwidth", "10Gbit", "--density", "0.01"]
    assert "oktopk" in installed("horovod-sparse", "advise", *network)


def test_the_tag_of_the_wheel_names_this_python_and_a_linux_no_newer_than_this_one(packages):
    python, abi, platforms = re.fullmatch(r".*-(\w+)-(\w+)-([\w.]+)\.whl", packages[1].name).groups()
    assert python == abi == f"cp{sys.version_info.major}{sys.version_info.minor}"
    own = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
    for platform in platforms.split("."):
        glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+|manylinux2014_\w+", platform).groups()
        assert glibc == (None, None) or tuple(map(int, glibc)) <= own


def test_a_wheel_that_does_not_fit_the_platform_is_an_error(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    build = "mkdir -p build/packages && touch build/packages/a.whl build/packages/a.tar.gz"
    put_program(tmp_path / "venv/bin/python", build)
    put_program(tmp_path / "venv/bin/auditwheel", "echo too recent >&2; exit 1")
    done = make_wheel(tmp_path, "venv", PLATFORM="manylinux_2_17_x86_64")
    assert done.returncode != 0
    assert "does not fit manylinux_2_17_x86_64" in done.stderr
    assert "make wheel PLATFORM=" in done.stderr
    assert not (tmp_path / "dist").exists()

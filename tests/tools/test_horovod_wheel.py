"""How Horovod is built, and which environments may share a built wheel."""

from pathlib import Path

import pytest

import environment
import horovod_wheel
from mpi_stack import Mpi

MPI = Mpi(Path("/cluster/bin/mpicxx"), Path("/cluster/lib/libmpi.so.40"), "Open MPI v4.1.6")


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """Provide a user's environment without settings for Horovod, with torch 2.13.0 and an available source."""
    for name in [*horovod_wheel.options({}), "HOROVOD_GPU_OPERATIONS", "CXX", "MAKEFLAGS", "MPI_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(horovod_wheel, "_torch_version", lambda: "2.13.0")
    monkeypatch.setattr(horovod_wheel, "pip", lambda *arguments: None)
    monkeypatch.setattr(horovod_wheel, "unpack", lambda folder: folder)
    monkeypatch.setattr(horovod_wheel, "correct", lambda source, changes: None)


def test_the_build_has_mpi_and_torch_and_nothing_else():
    assert horovod_wheel.options({"HOME": "/root"}) == {
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
    }


def test_the_users_variables_take_precedence(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("CXX", "g++-12")
    monkeypatch.setenv("MAKEFLAGS", "-j3")
    env = horovod_wheel.build_environment(MPI)
    assert env["HOROVOD_WITH_GLOO"] == "1"
    assert "HOROVOD_WITHOUT_GLOO" not in env
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert (env["CXX"], env["MAKEFLAGS"]) == ("g++-12", "-j3")


def test_the_build_uses_the_mpi_that_was_found_and_one_job_per_core_at_most():
    env = horovod_wheel.build_environment(MPI)
    assert env["PATH"].startswith("/cluster/bin:")
    assert env["MPI_HOME"] == "/cluster"
    assert int(env["MAKEFLAGS"].removeprefix("-j")) >= 1


def test_the_mpi_of_the_environment_is_searched_for_from_where_the_binary_is(monkeypatch):
    monkeypatch.setenv("LDFLAGS", "-s")
    inside = Mpi(MPI.mpicxx, environment.PREFIX.resolve() / "lib/libmpi.so.40", MPI.version)
    path, own = horovod_wheel.build_environment(inside)["LDFLAGS"].split()
    relative = path.removeprefix("-Wl,-rpath,'$ORIGIN/").removesuffix("'")
    binary = Path(environment.sysconfig.get_path("platlib"), "horovod", "torch")
    assert (binary / relative).resolve() == inside.library.parent
    assert own == "-s"
    assert horovod_wheel.build_environment(MPI)["LDFLAGS"] == "-s"


def test_equal_environments_share_a_wheel(monkeypatch):
    def folder(prefix):
        monkeypatch.setattr(horovod_wheel, "PREFIX", Path(prefix))
        return horovod_wheel.wheel_folder(Mpi(Path(prefix, "bin/mpicxx"), Path(prefix, "lib/libmpi.so.40"), "v4.1.8"))

    assert folder("/home/a/.venv") == folder("/home/b/.venv")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(horovod_wheel, "_torch_version", lambda: "2.12.0"),
        lambda patch: patch.setattr(horovod_wheel, "VERSION", "0.28.2"),
        lambda patch: patch.setattr(horovod_wheel.sysconfig, "get_config_var", lambda name: "cpython-314"),
        lambda patch: patch.setenv("HOROVOD_WITH_GLOO", "1"),
        lambda patch: patch.setattr(horovod_wheel, "corrections", lambda environ: []),
        lambda patch: patch.setenv("CXX", "clang++"),
    ],
    ids=["torch", "horovod", "python", "variable", "corrections", "compiler"],
)
def test_what_the_binary_depends_on_changes_the_folder(change, monkeypatch):
    before = horovod_wheel.wheel_folder(MPI)
    change(monkeypatch)
    assert horovod_wheel.wheel_folder(MPI) != before


def test_another_mpi_changes_the_folder():
    versions = [Mpi(MPI.mpicxx, MPI.library, version) for version in ("v4.1.6", "v4.1.8")]
    places = [Mpi(MPI.mpicxx, Path(f"/{name}/lib/libmpi.so.40"), "v4.1.6") for name in ("cluster", "apps")]
    assert len({horovod_wheel.wheel_folder(mpi) for mpi in versions + places}) == 3


@pytest.mark.parametrize(
    ("error", "remedy"),
    [("g++: fatal error: Killed signal terminated program", "MAKEFLAGS=-j1"), ("something else", "Fix the problem")],
)
def test_a_failed_build_is_reported_and_leaves_no_wheel(error, remedy, monkeypatch, capsys):
    after = 100 if "fatal error:" in error else 10  # without a sign of an error the last lines are shown
    lines = [*(f"line {i}" for i in range(100)), error, *(f"cleaning {i}" for i in range(after))]
    script = "printf '%s\\n' '" + "' '".join(lines) + "'; exit 1"
    monkeypatch.setattr(horovod_wheel, "build_command", lambda source, folder: ["sh", "-c", script])
    folder = horovod_wheel.wheel_folder(MPI)
    with pytest.raises(environment.InstallError) as caught:
        horovod_wheel.build_wheel(MPI, folder)
    message = str(caught.value)
    assert f"line 99\n    {error}\n    cleaning 0" in message
    assert "line 10\n" not in message
    assert "cleaning 90" not in message
    assert remedy in message
    log = folder.with_suffix(".log")
    assert str(log) in message
    assert list(folder.parent.iterdir()) == [log]


def test_a_built_wheel_is_kept(monkeypatch, capsys):
    name = "horovod-0.28.1-any.whl"
    monkeypatch.setattr(horovod_wheel, "build_command", lambda source, folder: ["touch", f"{folder}/{name}"])
    folder = horovod_wheel.wheel_folder(MPI)
    assert horovod_wheel.find_wheel(folder) is None
    wheel = horovod_wheel.build_wheel(MPI, folder)
    assert horovod_wheel.find_wheel(folder) == wheel == folder / name

"""Missing requirements are named with a remedy before anything is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from stubs import put_program

SCRIPT = Path(__file__).parents[2] / "tools" / "toolchain.sh"


def check(folder, python=sys.executable, compiler="g++", venv="/nowhere/.venv"):
    folder.mkdir(exist_ok=True)
    return subprocess.run([SCRIPT, python, compiler, venv], cwd=folder, capture_output=True, text=True, check=False)


def test_a_complete_machine_passes_silently(tmp_path):
    done = check(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["my project", "a'b", "$HOME"])
def test_a_path_with_special_characters_is_refused(name, tmp_path):
    done = check(tmp_path / name)
    assert done.returncode == 1
    assert name in done.stderr
    assert check(tmp_path, venv=f"/nowhere/{name}").returncode == 1


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"python": "no-such-python"}, "PYTHON=python3.12"),
        ({"python": "no-such-python"}, "apt-get install python3 python3-venv"),
        ({"compiler": "no-such-compiler"}, "CXX=g++-12"),
        ({"compiler": "false"}, "apt-get install g++"),
    ],
)
def test_missing_tools_have_a_remedy(setting, remedy, tmp_path):
    done = check(tmp_path, **setting)
    assert done.returncode == 1
    assert next(iter(setting.values())) in done.stderr
    assert remedy in done.stderr


def test_an_old_python_is_refused_also_in_an_environment_that_exists(tmp_path):
    old = 'case "$*" in *version_info*) exit 1;; --version) echo "Python 3.8.1";; esac'
    python = put_program(tmp_path / "venv" / "bin" / "python", old)
    for setting in ({"python": str(python)}, {"venv": str(tmp_path / "venv")}):
        done = check(tmp_path, **setting)
        assert done.returncode == 1
        assert "Python 3.8.1; Python 3.10 or newer is needed" in done.stderr


def test_an_environment_that_exists_needs_no_venv_module(tmp_path):
    script = f'case "$*" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    python = put_program(tmp_path / "venv" / "bin" / "python", script)
    assert check(tmp_path, venv=str(tmp_path / "venv")).returncode == 0
    done = check(tmp_path, python=str(python))
    assert done.returncode == 1
    assert "python3-venv" in done.stderr


def test_headers_of_python_are_needed(tmp_path):
    script = f'case "$*" in *Python.h*) exit 1;; esac; exec {sys.executable} "$@"'
    done = check(tmp_path, python=str(put_program(tmp_path / "bin" / "python", script)))
    assert done.returncode == 1
    assert "python3-dev" in done.stderr

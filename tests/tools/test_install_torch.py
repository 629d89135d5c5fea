"""Which build of torch is taken: the user's choice, the CPU build without a driver, pip's own otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import install_torch

# pip as `python -m pip`: notes its arguments; where uv is wanted, it brings one that notes its own.
PIP = """
import os, sys
from pathlib import Path
note = Path(os.environ["HOME"], "notes")
note.open("a").write("pip " + " ".join(sys.argv[1:]) + "\\n")
if "uv" in sys.argv:
    uv = Path(sys.argv[sys.argv.index("--target") + 1], "bin", "uv")
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\\necho "uv $*" >>"$HOME/notes"\\n' + os.environ["UV"] + "\\n")
    uv.chmod(0o755)
"""

CPU = f"uv pip install --python {sys.executable} --torch-backend=cpu {install_torch.TORCH}"
DEFAULT = f"pip install {install_torch.TORCH}"


@pytest.fixture
def install(tmp_path):
    """Runs the installer in an empty environment, without site-packages, and returns what it had installed."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)

    def run(*arguments, driver=False, uv="exit 0"):
        path = f"{tmp_path}:{Path(install_torch.__file__).parent}"
        env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": path, "UV": uv}
        code = f"import sys, install_torch as i; i.has_driver = lambda: {driver}; sys.exit(i.main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-S", "-c", code, *arguments], env=env, check=True, timeout=60)
        return [line for line in (tmp_path / "notes").read_text().splitlines() if "--target" not in line]

    return run


def test_without_a_driver_the_cpu_build_is_taken(install):
    assert install() == [f"{CPU} --dry-run", CPU]


def test_pip_chooses_if_the_cpu_build_is_unavailable(install, capfd):
    assert install(uv="exit 2") == [f"{CPU} --dry-run", DEFAULT]
    assert "pip chooses" in capfd.readouterr().out


def test_the_index_is_probed_with_a_short_timeout_and_installed_from_with_a_long_one(install, tmp_path):
    hasty = 'test "$UV_HTTP_RETRIES:$UV_HTTP_CONNECT_TIMEOUT" = 0:3'
    assert install(uv=f'case "$*" in *dry-run*) {hasty} ;; *) ! {hasty} ;; esac') == [f"{CPU} --dry-run", CPU]


def test_with_a_driver_pip_chooses(install):
    assert install(driver=True) == [DEFAULT]


def test_the_users_choice_takes_precedence(install):
    assert install("torch==2.12.0", "--no-index") == ["pip install torch==2.12.0 --no-index"]


def test_an_installed_torch_is_kept(monkeypatch):
    monkeypatch.setattr(install_torch.subprocess, "call", pytest.fail)
    assert install_torch.main(["torch==2.12.0"]) == 0


def test_a_driver_is_detected_by_its_program(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert install_torch.has_driver()

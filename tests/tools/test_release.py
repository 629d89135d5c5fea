"""A release has one version, a changelog with its date, a tag, and packages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).resolve().parents[2]
FILES = ("horovod_sparse/__init__.py", "CHANGELOG.md", "CITATION.cff", "packaging")


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Provide a repository that can be released, with the version's files of this one."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    change(tmp_path / "CHANGELOG.md", "] - unreleased", "] - 2030-01-01")
    for name in (f"{release.version(ROOT)}.tar.gz", f"{release.version(ROOT)}-cp311-cp311-linux_x86_64.whl"):
        (tmp_path / "dist").mkdir(exist_ok=True)
        (tmp_path / "dist" / f"horovod_sparse-{name}").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / ".gitignore").write_text("/dist/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", f"v{release.version(ROOT)}"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_this_repository_has_one_version_and_one_section_for_each():
    assert release.version_problems(ROOT) == []
    assert [problem for problem in release.changelog_problems(ROOT) if "sections" in problem] == []


def test_a_ready_repository_can_be_released(ready, capsys):
    assert release.main(["--packages"]) == 0
    assert "can be released" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("horovod_sparse/__init__.py", '__version__ = "', '__version__ = "9', "CITATION.cff has version"),
        ("CITATION.cff", "\nversion: 0", "\nversion: 10", "CITATION.cff has version 10"),
        ("packaging/spack/package.py", 'version("0', 'version("10', "package.py has version 10"),
        ("CHANGELOG.md", "2030-01-01", "soon", "give it the date of the release"),
        ("CHANGELOG.md", "## [", "## [0.1.0] - internal\n\n## [", "CHANGELOG.md has 2 sections 0.1.0"),
        ("CITATION.cff", "Cite", "Quote", "the working tree has changes"),
    ],
)
def test_missing_preparations_are_named(ready, capsys, name, old, new, message):
    change(ready / name, old, new)
    assert release.main([]) == 1
    assert message in capsys.readouterr().out


def test_a_missing_tag_a_missing_wheel_and_an_old_one_are_named(ready, capsys):
    subprocess.run(["git", "-C", str(ready), "tag", "-d", f"v{release.version(ROOT)}"], check=True)
    next((ready / "dist").glob("*.whl")).rename(ready / "dist/horovod_sparse-0.0.1.whl")
    assert release.main(["--packages"]) == 1
    shown = capsys.readouterr().out
    assert f"this commit has no tag v{release.version(ROOT)}" in shown
    assert "dist/horovod_sparse-0.0.1.whl is of another version" in shown
    assert "dist/ has no wheel" in shown

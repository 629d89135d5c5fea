"""What holds for the files of slurm/ without a SLURM."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = REPOSITORY / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
TRAINING = [path for path in SCRIPTS if "train" in re.findall(r"\w+", path.read_text().split("set -euo", 1)[1])]


def section(name: str) -> str:
    """One section of apptainer.def."""
    sections = re.split(r"^%(\w+).*$", (SLURM / "apptainer.def").read_text(), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[name]


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.s*")), ids=lambda path: path.name)
def test_bash_can_read_every_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_script_has_a_line_in_the_readme() -> None:
    text = (SLURM / "README.md").read_text()
    assert not [path.name for path in SLURM.iterdir() if path.name != "README.md" and f"`{path.name}`" not in text]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_every_training_can_be_preempted(path: Path) -> None:
    text = path.read_text()
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --open-mode=append\n" in text, "the log of the first part would be lost"
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.MULTILINE)


def test_the_container_copies_files_that_exist() -> None:
    sources = [line.split()[0] for line in section("files").splitlines() if line.strip()]
    assert sources
    assert not [source for source in sources if not (REPOSITORY / source).exists()]


def test_bash_can_read_what_builds_the_container() -> None:
    done = subprocess.run(
        ["bash", "-n"], input=section("post"), capture_output=True, text=True, timeout=10, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

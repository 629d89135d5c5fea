"""shellcheck, which `make test-slurm` installs, finds nothing to say about the scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_shell_scripts_are_clean() -> None:
    paths = [*REPOSITORY.glob("slurm/*.s*"), *REPOSITORY.glob("tools/*.sh"), *REPOSITORY.glob("tests/slurm/*.sh")]
    command = ["shellcheck", "--external-sources", *paths]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""The example for arrays learns what it is there to learn, and sends less than dense."""

from __future__ import annotations

import re
from pathlib import Path

import launch

ROOT = Path(__file__).resolve().parents[2]


def test_three_ranks_learn_from_a_fifteenth_of_the_bytes() -> None:
    assert "```{literalinclude} ../examples/arrays.py\n" in (ROOT / "docs" / "arrays.md").read_text()
    done = launch.python("-m", "mpi4py", str(ROOT / "examples" / "arrays.py"), ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"accuracy (\S+), (\S+) bytes sent, (\S+) if dense\n", done.stdout)
    assert found is not None, done.stdout
    accuracy, sent, dense = (float(number.replace(",", "")) for number in found.groups())
    assert 0.9 < accuracy <= 1  # 0.5 is to guess; dense reaches 0.95
    assert 0 < sent < dense / 15  # with coded indices, which are not sure to pay here, less than a twentieth

"""The script of the quick start runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import launch

ROOT = Path(__file__).resolve().parents[2]


def test_the_quick_start_trains_on_two_ranks() -> None:
    assert "```{literalinclude} ../examples/minimal.py\n" in (ROOT / "docs" / "quickstart.md").read_text()
    done = launch.python(str(ROOT / "examples" / "minimal.py"), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    sent = [int(number.replace(",", "")) for number in re.findall(r"(\S+) bytes sent", done.stdout)]
    assert len(losses) == len(sent) == 5
    assert losses[-1] < losses[0] / 2
    dense = 4 * 1.01e5  # bytes of all gradients
    assert 0 < sent[-1] / 100 < dense / 20

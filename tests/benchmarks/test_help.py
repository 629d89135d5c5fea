"""Every benchmark's --help shows what it does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTED_BY_OTHERS = {"worker", "overlap"}
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "_parser(" in path.read_text() or "ArgumentParser(" in path.read_text() or "command_line(" in path.read_text()
    if '__name__ == "__main__"' in path.read_text() and path.stem not in STARTED_BY_OTHERS
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # some are imported by others, too
@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_command_and_its_options(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(command, run_name="__main__")
    shown = capsys.readouterr().out
    assert command in shown
    assert "--" in shown.replace("--help", "")

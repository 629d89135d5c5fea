"""The runner of a first hour on a GPU: failing or hanging steps do not stop others, and every part ends in time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.gpu import hour
from tools.gpu.hour import PARTS, Step

ROOT = Path(__file__).resolve().parents[2]
STEPS = [step for part in PARTS.values() for group in part() for step in group]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps with each outcome the only part."""
    steps = [
        [Step("hangs", "sleep 100", 1), Step("passes", "python -c 'print(1); print(); print(\"== 2 passed ==\")'", 60)],
        [Step("fails", "python -c 'raise SystemExit(3)'", 60), Step("missing", "no-such-program", 60)],
    ]
    monkeypatch.setitem(PARTS, "check", lambda: steps)
    monkeypatch.setattr(hour, "cards", lambda: ["a card, 1.0, 2 MiB"])


def test_every_step_reports_its_outcome(part: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert hour.main(["check", "--output", str(tmp_path)]) == 1
    assert time.monotonic() - begin < 60
    result = json.loads((tmp_path / "check.json").read_text())
    assert result["cards"] == ["a card, 1.0, 2 MiB"]
    assert result["versions"]["numpy"]
    outcomes = {step["name"]: (step["outcome"], step["summary"][:8]) for step in result["steps"]}
    assert outcomes["passes"] == ("passed", "2 passed")
    assert outcomes["hangs"] == ("too long", "")
    assert outcomes["fails"] == ("failed", "")
    assert outcomes["missing"][0] == "failed"
    assert (tmp_path / "passes.log").read_text().startswith("1\n")
    assert "a card" in capsys.readouterr().out


def test_missing_packages_are_named_first(
    part: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hour.main(["check", "--output", str(tmp_path), "--only", "passes"])
    assert "not installed" not in capsys.readouterr().out
    monkeypatch.setattr(hour, "NEEDED", ("json", "no_such_package", "another"))
    hour.main(["check", "--output", str(tmp_path), "--only", "passes"])
    assert capsys.readouterr().out.splitlines()[0].endswith("not installed: no_such_package, another")


def test_chosen_steps_run_alone(part: None, tmp_path: Path) -> None:
    assert hour.main(["check", "--output", str(tmp_path), "--only", "passes"]) == 0
    assert [path.name for path in tmp_path.glob("*.log")] == ["passes.log"]


def test_without_a_gpu_steps_are_rehearsed(part: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hour, "cards", list)
    monkeypatch.setitem(PARTS, "check", lambda: [[Step("never", "false", 9), Step("small", "false", 9, "true")]])
    assert hour.main(["check", "--output", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert [step["outcome"] for step in steps] == ["needs a GPU", "passed"]


def test_all_tests_of_the_device_are_collected_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    """With CuPy itself and a driver that only counts devices, so that nothing may use one before a test runs."""
    driver = tmp_path / "driver.c"
    driver.write_text("int cuInit(unsigned flags) { return 0; }\nint cuDeviceGetCount(int* n) { *n = 1; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", driver], check=True, timeout=60)
    folders = sorted({word for step in STEPS for word in step.command.split() if re.fullmatch(r"tests/\w+", word)})
    assert "tests/cuda" in folders
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *folders]
    libraries = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    collected = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert collected.returncode == 0, collected.stdout
    for file in ("on_gpu", "nccl", "every_kernel", "worker", "front_ends"):
        assert f"tests/cuda/test_{file}.py::" in collected.stdout


@pytest.mark.parametrize("name", PARTS)
def test_a_part_ends_within_nine_minutes(name: str) -> None:
    assert sum(max(step.limit for step in group) for group in PARTS[name]()) <= 540


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_commands_name_files_and_modules_that_exist(step: Step) -> None:
    paths = re.findall(r"(?:tests|examples|tools|benchmarks)/[\w/.]+", step.command)
    modules = [name.replace(".", "/") for name in re.findall(r"-m (benchmarks[\w.]+)", step.command)]
    assert paths or modules
    for path in paths:
        assert (ROOT / path).exists(), path
    for module in modules:
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), module

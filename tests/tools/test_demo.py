"""The demo: what it runs, prints and draws, with and without an emulated network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from processes import Mark
from stubs import forbid_namespaces

from benchmarks.cluster import emulated
from tools import demo, demo_report
from tools.demo_report import meaning, plot, table

ROOT = Path(__file__).resolve().parents[2]
CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


def run(name: str, compression: str, step: float, accuracy: float = 0.97) -> demo_report.Run:
    stages = ("forward", "backward", "select", "agree", "exchange", "apply", "synchronize", "update")
    epochs = [
        {
            "test_accuracy": accuracy - 0.1 / number,
            "samples_per_second": 1000 / step,
            "bytes_sent": 2e6 * number,
            "bytes_per_step": 1e6,
            "ms_per_step": {"step": step, **dict.fromkeys(stages, step / 10)},
        }
        for number in (1, 2)
    ]
    content = {"configuration": {"compression": compression}, "ranks": 4, "steps_per_epoch": 2, "epochs": epochs}
    return demo_report.Run(name, content)


def runs() -> dict[str, demo_report.Run]:
    steps = {"dense": ("none", 100.0), "fp16": ("fp16", 50.0), "sparse": ("topka:density=0.01", 20.0)}
    return {name: run(name, *one) for name, one in steps.items()}


def test_each_place_is_compared_with_its_own_dense_run():
    slow, here = runs(), {**runs(), "sparse": run("sparse", "topka:density=0.01", 200.0)}
    lines = table({"slow": slow, "here": here}).splitlines()
    cells = {line[:32].strip(): line[32:].split() for line in lines}
    assert cells["speedup"] == ["1.00x", "2.00x", "5.00x", "1.00x", "2.00x", "0.50x"]
    assert cells["samples/s"] == ["10", "20", "50", "10", "20", "5"]
    assert cells["exchange *"] == ["-", "-", "2.0", "-", "-", "20.0"]  # a dense one is not seen by itself
    assert max(map(len, lines)) <= 120


def test_what_a_slow_link_stands_for_is_calculated_from_its_dense_run():
    # 30 ms of computing; 1 MB takes 80 ms at 100 Mbit/s. 153.6 MB take 2.67 times 100 ms at 4.6 Gbit/s.
    text = meaning(runs()["dense"], 10**8)
    assert "computes for 30 ms" in text
    assert "80 ms, 2.7 times as long" in text
    assert "links of 4.6 Gbit/s" in text


def test_the_figure_is_a_png(tmp_path):
    plot([*runs().values()], "slow", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_failed_runs_are_shown_with_the_end_of_their_output(tmp_path):
    command = [sys.executable, "-c", "print('50%|# | 1/2 [00:01<'); raise SystemExit('out of paper')"]
    with demo.progress_bar(200, show=True) as bar, pytest.raises(RuntimeError, match=r"status 1:(.|\n)*out of paper"):
        demo.watch(command, os.environ, tmp_path / "log.txt", 2, bar)
    assert bar.n == 50


def test_the_bar_counts_every_run(tmp_path):
    states = "0/2 [", "1/2 [", "2/2 [", "0/2 [", "1/2 ["
    with demo.progress_bar(200, show=True) as bar:
        demo.watch([sys.executable, "-c", f"print(*{states}, sep='\\n')"], os.environ, tmp_path / "log.txt", 2, bar)
    assert bar.n == 200


def test_a_wrong_rate_is_refused(capsys):
    assert demo.main(["--link", "fast"]) == 1
    assert "'fast' is not a rate" in capsys.readouterr().err


def test_without_namespaces_the_demo_compares_on_this_machine_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "obstacle", lambda: "tc not found: install iproute2")
    monkeypatch.setattr(demo, "train_here", lambda options, bar: runs())
    assert demo.main(["--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Skipping the slow network, which this machine cannot emulate: tc not found" in shown
    assert "this machine" in shown
    assert "nodes" not in shown


def test_a_failed_run_fails_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "obstacle", lambda: "")
    monkeypatch.setattr(demo, "train_slow", Mock(side_effect=RuntimeError("no disk")))
    assert demo.main([]) == 1
    assert "demo: no disk" in capsys.readouterr().err


# The kernel's own refusal, as an ordinary user meets it: no user namespaces, and no right to do without.
FORBIDDEN = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "
ASK = "from benchmarks.cluster.emulated import obstacle; print(obstacle())"


def test_kernels_without_user_namespaces_are_detected():
    if reason := emulated.obstacle():
        pytest.skip(f"no namespaces here: {reason}")
    ask = [sys.executable, "-c", ASK]
    closed = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{FORBIDDEN} "$@"', "sh", *ask]
    assert "sysctl user.max_user_namespaces" in subprocess.run(closed, cwd=ROOT, **CAPTURED).stdout
    assert subprocess.run(["unshare", "--user", "--map-root-user", *ask], cwd=ROOT, **CAPTURED).stdout == "\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "possible", [pytest.param(True, marks=pytest.mark.nightly), pytest.param(False, marks=pytest.mark.full)]
)
def test_the_demo_trains_and_leaves_nothing_running(possible, tmp_path):
    if not possible:
        forbid_namespaces(tmp_path)
    mark = Mark()
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    command = [sys.executable, "-m", "tools.demo", "--epochs", "1", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **mark.variables, "PATH": path}, **CAPTURED)
    assert done.returncode == 0, done.stderr
    # The stub is all that stands in the way.
    slow = possible and not emulated.obstacle()
    assert ("Skipping the slow network" in done.stdout) == (not slow)
    assert (tmp_path / "out" / "demo.png").exists() == slow
    assert len(re.findall(r"\d\d\.\d\d%", done.stdout)) == (6 if slow else 3)
    for name in demo.RUNS:
        result = json.loads((tmp_path / "out" / "here" / name / "result.json").read_text())
        assert result["configuration"]["compression"] == demo.RUNS[name]
    assert mark.gone()

"""benchmarks.kernels.steps measures the pipeline in place, and finds what is wrong with it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks.kernels import steps


def test_every_contender_is_measured_and_right(monkeypatch, capsys, tmp_path):
    saved = tmp_path / "steps.jsonl"
    arguments = f"--sizes 20K --densities 0.01 --threads 1,2 --turns 2 --output {saved}"
    monkeypatch.setattr(sys, "argv", ["steps", *arguments.split()])
    try:
        assert steps.main() == 0
    finally:
        steps.metrics.enable(False)
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("bound", "step", "with", "nesterov"))
    ]
    assert [row[0] for row in rows] == ["bound", "bound", "step", "with", "with", "nesterov"] * 2
    assert all(float(row[-5]) > 0 for row in rows if row[0] != "bound")  # select
    assert {row[-1] for row in rows} == {"0"}
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert {"cpu", "torch"} <= set(lines[0]["machine"])
    assert [line["contender"] for line in lines] == list(steps.BYTES) * 4


@pytest.mark.parametrize("name", steps.SETTINGS)
def test_an_element_that_is_wrong_is_counted(monkeypatch, name):
    case = steps.Case(5000, 0.01, 1)
    case.run(name)
    scatter = case.pipelines[name]._scatter

    def spoil(total, outputs, cleared=False):
        scatter(total, outputs, cleared)
        outputs[0][1][[3, 4]] += np.float32(1)

    monkeypatch.setattr(case.pipelines[name], "_scatter", spoil)
    assert case.wrong(name) == 2

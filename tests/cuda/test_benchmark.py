"""Benchmarks with --device cuda measure and verify; without a GPU, their times mean nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import EmulatedDevice, emulated
from laws import everywhere

from benchmarks.kernels import cuda_input, selection, steps
from benchmarks.training_step.measure import measure
from horovod_sparse import metrics
from horovod_sparse.engine import layout
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.in_process import run_ranks


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a GPU, treat tensors of the CPU as device tensors."""
    if emulated():
        pretend(monkeypatch)
    yield
    metrics.enable(False)
    metrics.clear()


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = EmulatedDevice()
    for module in (cuda_input, steps):
        monkeypatch.setattr(module, "GPU", torch.device("cpu"))
    for module in (cuda_input, steps, layout):
        monkeypatch.setattr(module, "device_of", lambda _: pretended)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "emulated")
    monkeypatch.setattr(cuda_input.cupy.cuda.runtime, "driverGetVersion", lambda: 0, raising=False)
    enable = metrics.enable
    monkeypatch.setattr(metrics, "enable", lambda on=True, device=None: enable(on))  # times of the host


def test_every_contender_is_measured_and_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 20_000
    monkeypatch.setattr(cuda_input, "SIZES", (size,))
    arguments = f"--device cuda --sizes {size} --densities 0.01 --turns 1"
    monkeypatch.setattr(sys, "argv", ["selection", *arguments.split()])
    assert selection.main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(("stream", "ours", "topk", "chain", "merge"))]
    assert [row[0] for row in rows] == ["stream", "ours", "topk", "chain", "merge"]
    assert all(float(row[1]) > 0 for row in rows)
    assert len([line for line in lines if line.startswith("target ")]) == 5
    assert any(line.startswith("target merge < 1 ms") for line in lines)


@pytest.mark.parametrize("program", [selection, steps])
def test_results_name_the_device_and_its_software(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "results.jsonl"
    arguments = f"--device cuda --sizes 20K --densities 0.01 --turns 1 --output {saved}"
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split()])
    assert program.main() == 0
    machine = json.loads(saved.read_text().splitlines()[0])["machine"]
    assert {"gpu", "driver", "cuda", "cupy", "torch"} <= set(machine)


def test_whole_steps_on_the_device_are_right() -> None:
    with steps.open_cell([*steps.BYTES], 5000, 0.01, 1, "cuda") as measure_step:
        found = [measure_step(name) for name in steps.BYTES]
    assert all(one["wrong"] == 0 and one["ms"] > 0 for one in found)


def test_a_wrong_step_on_the_device_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = steps.Case(5000, 0.01, 1, steps.GPU)
    case.run("step")
    scatter = case.pipelines["step"]._scatter

    def spoil(total: Any, outputs: Any, cleared: bool = False) -> None:
        scatter(total, outputs, cleared)
        outputs[0][1][:2] += 1

    monkeypatch.setattr(case.pipelines["step"], "_scatter", spoil)
    assert case.wrong("step") == 2
    case.close()


def training(**options: Any) -> Any:
    """Return options of benchmarks.training_step for a few steps of a small model."""
    device = "cpu" if emulated() else "cuda"
    return argparse.Namespace(model="cnn", batch=2, length=1, density=0.01, steps=2, warmup=1, device=device, **options)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_a_training_step_compresses_on_the_device(overlap: bool) -> None:
    (found,) = run_ranks(1, lambda transport: measure(training(overlap=overlap), transport, "recommended"))
    assert all(found.ms[part][0] > 0 for part in ("step", "forward", "backward", "compression", "update"))
    assert found.kilobytes_sent == 0


@pytest.mark.full
@pytest.mark.mpi
def test_ranks_exchange_a_fraction_from_the_device(transport: Transport) -> None:
    dense, ours = (measure(training(overlap=False), transport, name) for name in ("dense", "ours"))
    few = ours.kilobytes_sent < 0.1 * dense.kilobytes_sent or transport.size == 1
    assert everywhere(transport, few and ours.ms["compression"][0] > 0)

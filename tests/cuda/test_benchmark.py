"""benchmarks.kernels.selection --device cuda measures and verifies; without a GPU its times mean nothing."""

from __future__ import annotations

import argparse

import pytest
import torch
from devices import EmulatedDevice, emulated

from benchmarks.kernels import cuda_input, selection


def test_every_contender_is_measured_and_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 20_000
    monkeypatch.setattr(cuda_input, "SIZES", (size,))
    if emulated():
        pretended = EmulatedDevice()
        monkeypatch.setattr(cuda_input, "GPU", torch.device("cpu"))
        monkeypatch.setattr(cuda_input, "device_of", lambda _: pretended)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda: 0)
    group, targets = selection.rows(size, 0.01, 1, argparse.Namespace(device="cuda", rounds=1))
    assert [row.contender for row in group] == ["stream", "ours", "topk", "chain", "merge"]
    assert all(row.wrong == 0 and row.min_ms > 0 for row in group)
    assert len(targets) == 5
    selection.show(group, targets)
    assert "target merge < 1 ms" in capsys.readouterr().out

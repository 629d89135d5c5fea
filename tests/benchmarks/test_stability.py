"""Counts of the stability benchmark; it trains and draws."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.convergence import stability
from benchmarks.convergence.stability import BLOCKS, Recorder, main


def test_a_vector_that_stays_is_wholly_stable_and_noise_is_not():
    still, noise = Recorder(4096), Recorder(4096)
    vector = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for seed in range(30):
        still.note(vector)
        noise.note(np.random.default_rng(seed).standard_normal(4096).astype(np.float32))
    for block in BLOCKS:
        assert still.overlap(block, 10) == 1.0
    assert noise.overlap(1, 10) == pytest.approx(0.1, abs=0.02)


def test_blocks_count_by_their_norm():
    recorder = Recorder(64)
    for sign in (1, -1):
        vector = np.zeros(64, np.float32)
        vector[[3, 20, 21, 22]] = np.array([5, sign * 4, 4, 4])
        recorder.note(vector)
    (chosen, again) = recorder._best[16]
    assert np.flatnonzero(chosen).tolist() == np.flatnonzero(again).tolist() == [1]


def test_a_short_run_draws_its_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stability, "LAGS", (1, 5))
    monkeypatch.setattr(stability, "_WARMUP", 2)
    path = tmp_path / "stability.png"
    main(["--task", "digits", "--steps", "10", "--output", str(path)])
    assert path.stat().st_size > 5000
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * len(BLOCKS)

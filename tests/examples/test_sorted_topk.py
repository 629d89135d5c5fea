"""The example of a rule of one's own: it selects what topk selects, and train.py takes it by its name."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
from rules import made

import horovod_sparse as hvs
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.rules.testing import check_sparsifier, run_ranks
from horovod_sparse.sparsifiers import TopK

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


@pytest.fixture
def rule(own_rules: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, registered for one test."""
    monkeypatch.delitem(sys.modules, "sorted_topk", raising=False)
    return importlib.import_module("sorted_topk").SortedTopK


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("held", [False, True])
def test_it_selects_what_topk_selects(rule: Any, dtype: Any, held: bool) -> None:
    size, generator = 5000, np.random.default_rng(0)
    one, other = made(rule, size), made(TopK, size)
    buffers = np.zeros((2, size), dtype)
    for number in range(50):
        gradient = generator.standard_normal(size).astype(dtype)
        segments = [(0, gradient[:1200]), (1300, gradient[1300:4000])] if held else [(0, gradient)]
        k = int(generator.integers(1, 6000 if number % 10 == 0 else 100))
        vectors = [
            sparsifier.take(Accumulator(buffer, segments, 0.5), k, Step(number=number))
            for sparsifier, buffer in zip((one, other), buffers, strict=True)
        ]
        for name in ("indices", "values"):
            np.testing.assert_array_equal(getattr(vectors[0], name), getattr(vectors[1], name), strict=True)
        np.testing.assert_array_equal(*buffers)
    assert np.abs(buffers).max() > 1


def test_it_obeys_the_laws(rule: Any) -> None:
    run_ranks(2, lambda transport: check_sparsifier(transport, rule))


def test_a_configuration_takes_it_by_its_name(rule: Any) -> None:
    sparse = hvs.parse("topka:density=0.001,sparsifier=sorttopk")
    assert isinstance(sparse.sparsifier, rule.Options)


@pytest.mark.full
def test_train_takes_rules_of_ones_own(tmp_path: Path) -> None:
    arguments = ["--rules", "sorted_topk", "--compression", "topka:density=0.01,sparsifier=sorttopk", "--epochs", "1"]
    arguments += ["--warmup-epochs", "0", "--output", str(tmp_path)]
    run = launch.python(str(TRAIN), *arguments, ranks=2)
    assert run.returncode == 0, run.stdout + run.stderr
    (epoch,) = json.loads((tmp_path / "result.json").read_text())["epochs"]
    assert epoch["test_accuracy"] > 0.25
    assert epoch["bytes_sent"] > 0

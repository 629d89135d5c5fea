"""Ages and directions that the delay benchmark measures, where they are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.convergence import delay
from benchmarks.convergence.delay import COLUMNS, VARIANTS, Ages, main, measure
from benchmarks.convergence.tasks import TASKS

EVERYTHING = np.arange(3)
NOTHING = EVERYTHING[:0]


@pytest.mark.parametrize(("before", "fresh", "age"), [(True, 0, 9.0), (True, 0.4, 5.4), (True, 1, 0), (False, 0, 0.0)])
def test_entries_sent_immediately_have_the_age_of_their_momentum(before, fresh, age):
    ages = Ages(3, before, masking=False, fresh=fresh)
    for _ in range(300):
        new, sent = ages.step(np.ones(3), EVERYTHING, 0.5)
    assert new.tolist() == [1.5, 0]
    assert sent[1] / sent[0] == pytest.approx(age)
    assert sent[0] == pytest.approx(15 if before else 1.5)


def test_delayed_gradients_age():
    ages = Ages(3, before=False, masking=False, fresh=0)
    for _ in range(4):
        ages.step(np.array([1.0, 2.0, 0.0]), NOTHING, 1.0)
    new, sent = ages.step(np.array([5.0, 0.0, 0.0]), np.array([0]), 1.0)
    assert new.tolist() == sent.tolist() == [4 + 5, 1 + 2 + 3 + 4]
    assert ages.step(np.zeros(3), EVERYTHING, 1.0)[1].tolist() == [8, 2 * (2 + 3 + 4 + 5)]


def test_masking_clears_momentum():
    for masking, expected in ((False, 0.9), (True, 0.0)):
        ages = Ages(3, before=True, masking=masking, fresh=0)
        ages.step(np.array([1.0, 0, 0]), np.array([0]), 1.0)
        assert ages.step(np.zeros(3), EVERYTHING, 1.0)[1].tolist() == [expected, expected]


@pytest.fixture
def digits():
    task = dataclasses.replace(TASKS["digits"], batch=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, beside other tests
    yield task, task.load(None)[0]
    torch.set_num_threads(threads)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["after", "before"])
def test_at_density_1_it_is_dense_momentum(digits, variant):
    for numbers in measure(*digits, variant, steps=12, density=1.0):
        found = dict(zip(COLUMNS, numbers, strict=True))
        assert found["delay"] == found["held"] == 0
        assert found["length"] == pytest.approx(1, rel=1e-5)
        assert found["cosine"] == pytest.approx(1, rel=1e-5)


@pytest.mark.nightly
def test_momentum_after_the_selection_is_later(digits, monkeypatch):
    """Delayed gradients also wait for their momentum; masking makes updates shorter."""
    monkeypatch.setattr(delay, "WORKERS", 2)
    rows = {variant: measure(*digits, variant, steps=80, density=0.02)[0] for variant in VARIANTS}
    found = {variant: dict(zip(COLUMNS, numbers, strict=True)) for variant, numbers in rows.items()}
    assert found["after"]["age"] > found["before"]["age"] + 3
    assert found["masked"]["length"] < found["before"]["length"]
    assert all(0 < one["cosine"] < 1 and one["delay"] > 1 and one["held"] > 1 for one in found.values())


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(delay, "WORKERS", 2)
    main(["--task", "digits", "--steps", "6", "--density", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == list(VARIANTS)
    assert all(line.count("/") == 2 * len(COLUMNS) for line in lines[2:])

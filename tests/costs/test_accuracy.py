"""Quoted accuracies are those of the nearest measurements, and equal the documentation's."""

from __future__ import annotations

import pytest
from pages import ROOT

from horovod_sparse.costs import accuracy
from horovod_sparse.costs.accuracy import TRAININGS, Training, known, sums
from horovod_sparse.costs.model import CANDIDATES

SGD = Training("SGD", 16, 1000, 1, "topka", 0.01, 22.0, 20.0)
OKTOPK = Training("SGD", 16, 1000, 1, "oktopk", 0.01, 23.0, 20.0)
MANY = Training("SGD", 64, 300, 1, "topka", 0.01, 24.0, 20.0)
SPARSE = Training("SGD", 16, 1000, 1, "topka", 0.002, 25.0, 20.0)
ADAMW = Training("AdamW", 16, 1000, 1, "oktopk", 0.01, 26.0, 20.0)


@pytest.mark.parametrize(
    ("density", "ranks", "optimizer", "expected"),
    [
        (0.01, 4, "SGD", OKTOPK),  # the least accurate
        (0.01, 31, "SGD", OKTOPK),
        (0.01, 4096, "SGD", MANY),
        (0.01, 4096, "AdamW", ADAMW),
        (1.0, 16, "SGD", OKTOPK),  # a larger density is no less accurate
        (0.009, 64, "SGD", SPARSE),
        (0.009, 64, "AdamW", None),
        (0.001, 16, "SGD", None),
    ],
)
def test_the_least_accurate_training_on_the_nearest_number_of_ranks_is_known(
    monkeypatch, density, ranks, optimizer, expected
):
    monkeypatch.setattr(accuracy, "TRAININGS", (SGD, OKTOPK, MANY, SPARSE, ADAMW))
    assert known(density, ranks, optimizer) == expected


@pytest.mark.parametrize(
    ("keep", "ranks", "adaptive", "expected"),
    [
        ("auto", 4, True, 4),
        ("auto", 16, True, 8),
        ("auto", 64, True, 32),
        ("auto", 64, False, 4),
        (2.5, 64, True, 2.5),
        (None, 64, True, None),
    ],
)
def test_adaptive_optimizers_get_half_as_many_sums_as_ranks_send_entries(keep, ranks, adaptive, expected):
    assert sums(keep, ranks, adaptive) == expected


def test_the_loss_is_relative_to_dense_training():
    assert OKTOPK.loss == pytest.approx(0.15)


@pytest.mark.parametrize(
    "one", TRAININGS, ids=lambda one: f"{one.optimizer}-{one.ranks}-{one.collective}-{one.density:g}"
)
def test_the_table_of_the_documentation_has_every_training(one):
    """Edit docs/schedules.md together with costs/accuracy.py."""
    assert one.collective in CANDIDATES
    keep = sums("auto", one.ranks, adaptive=one.optimizer != "SGD")
    collective = f"`{one.collective}`" + f", `keep={keep:g}`" * (one.collective == "oktopk")
    figures = f"{one.perplexity:.2f} | {one.dense:.2f} | {one.loss:+.1%}".replace("%", " %")
    conditions = f"{one.optimizer} | {one.ranks} | {one.steps} | {one.seeds} | {collective} | {100 * one.density:g} %"
    row = f"| {conditions} | {figures} |"
    page = (ROOT / "docs/schedules.md").read_text().replace(" †", "")  # a mark of rows without a record
    assert row in page.splitlines()

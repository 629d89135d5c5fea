"""Step: the unit of a gradient."""

from __future__ import annotations

from horovod_sparse.step import Step


def test_a_gradient_becomes_an_update_by_the_learning_rate_and_without_the_loss_scale():
    assert Step().unit == 1.0
    assert Step(learning_rate=0.1, loss_scale=1024.0).unit == 0.1 / 1024
    assert Step(learning_rate=0.0).unit == 0.0

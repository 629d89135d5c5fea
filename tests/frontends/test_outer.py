"""The outer step is torch's SGD."""

from __future__ import annotations

import pytest
import torch

import horovod_sparse as hvs


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"lr": 1.0, "momentum": 0.0}, {"lr": 0.3}], ids=repr)
def test_the_outer_step_has_the_bits_of_torchs_sgd(settings):
    outer = hvs.OuterSGD(**settings)
    generator = torch.Generator().manual_seed(1)
    ours = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,))]
    theirs = [p.clone().requires_grad_() for p in ours]
    nesterov = outer.nesterov and outer.momentum > 0
    torchs = torch.optim.SGD(theirs, lr=outer.lr, momentum=outer.momentum, nesterov=nesterov)
    velocities = [torch.zeros_like(p) for p in ours]
    for _ in range(5):
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=generator)
        outer.apply(ours, [p.grad.clone() for p in theirs], velocities)
        torchs.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("settings", "value"),
    [({"lr": 0}, "0"), ({"lr": float("nan")}, "nan"), ({"momentum": 1.0}, "1.0"), ({"momentum": -0.1}, "-0.1")],
)
def test_a_value_out_of_range_is_named(settings, value):
    with pytest.raises(ValueError, match=f"not {value}: .*DiLoCo"):
        hvs.OuterSGD(**settings)

"""Shapes and sizes of the examples' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MODELS, build


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32)])
@pytest.mark.parametrize("name", MODELS)
def test_one_logit_per_class_and_a_gradient_everywhere(name: str, channels: int, side: int) -> None:
    torch.manual_seed(0)
    model = build(name, channels, side, classes=10)
    logits = model(torch.randn(2, channels, side, side))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize(
    ("name", "channels", "side", "expected"),
    [
        ("vgg16", 3, 32, 14_710_464 + 2 * 4_224 + 5_130),  # convolutions, batch normalization, the linear layer
        ("resnet18", 3, 32, 11_173_962),
        *(("cnn", channels, side, pytest.approx(200_000, abs=100_000)) for channels, side in ((1, 8), (3, 32))),
    ],
)
def test_cifar_variants_have_their_known_size_and_cnn_is_small(
    name: str, channels: int, side: int, expected: Any
) -> None:
    assert sum(parameter.numel() for parameter in build(name, channels, side, classes=10).parameters()) == expected


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'vgg19'; known are: cnn, vgg16, resnet18"):
        build("vgg19", 3, 32, 10)

"""Shapes and sizes of the examples' models."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, build


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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
    ("name", "expected"),
    [
        ("vgg16", 14_710_464 + 2 * 4_224 + 5_130),  # convolutions, batch normalization, the linear layer
        ("resnet18", 11_173_962),
    ],
)
def test_cifar_variants_have_their_known_size(name: str, expected: int) -> None:
    assert parameters(build(name, channels=3, side=32, classes=10)) == expected


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32)])
def test_cnn_is_small(channels: int, side: int) -> None:
    assert 100_000 < parameters(build("cnn", channels, side, classes=10)) < 300_000


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'vgg19'; known are: cnn, vgg16, resnet18"):
        build("vgg19", 3, 32, 10)

"""Models of the examples: a small CNN, and variants of VGG-16 and ResNet-18 for 32 x 32 images."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the conventional name

# Channels of VGG-16's convolutions; 0 means max pooling.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def build(name: str, channels: int, side: int, classes: int) -> nn.Module:
    """Return a new model with random parameters.

    Args:
        name: ``cnn``, ``vgg16`` or ``resnet18``.
        channels: Number of channels of an image.
        side: Height and width of an image; at least 8 for ``cnn``. The other models upsample smaller images to 32 x 32.
        classes: Number of logits.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are: {', '.join(MODELS)}")
    model = MODELS[name](channels, classes)
    if name != "cnn" and side < 32:
        return nn.Sequential(nn.Upsample(size=(32, 32), mode="bilinear"), model)
    return model


def cnn(channels: int, classes: int) -> nn.Module:
    """Return a CNN with two convolutions and two linear layers, about 150,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def vgg16(channels: int, classes: int) -> nn.Module:
    """Return VGG-16 (Simonyan and Zisserman 2015) with batch normalization and one linear layer."""
    layers: list[nn.Module] = []
    for width in _VGG16:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class BasicBlock(nn.Module):
    """Residual block with two convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (batch, channels, side, side) to (batch, width, side / stride, side / stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(channels: int, classes: int) -> nn.Module:
    """Return ResNet-18 (He et al. 2016) with a stride-1 first layer and no max pooling."""
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"cnn": cnn, "vgg16": vgg16, "resnet18": resnet18}

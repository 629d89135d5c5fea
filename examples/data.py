"""Data sets of the examples: scikit-learn's digits, Fashion-MNIST and CIFAR-10. Reading a file never executes code."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the conventional name
from torch.utils.data import BatchSampler, Dataset

CIFAR10_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST = ("test_batch.bin",)
CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes in row-major order
CIFAR10_CLASSES = 10
FASHION_MNIST = {
    part: tuple(f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")) for part in ("train", "t10k")
}


@dataclass(frozen=True)
class Normalization:
    """Normalization of pixel bytes: (x / largest - mean) / std, per channel."""

    largest: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Convert uint8 of shape (batch, channels, height, width) to float32 of the same shape."""
        shape = (-1, 1, 1)
        mean, std = torch.tensor(self.mean).view(shape), torch.tensor(self.std).view(shape)
        return (images / self.largest - mean) / std


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Labeled images, indexed by batch: one gather per batch instead of one access per sample.

    Args:
        images: uint8, shape (n, channels, height, width); a quarter of the memory of float32.
        labels: int64, shape (n,).
        normalization: Normalization applied to every batch.
        augment: Whether to flip and crop images at random, using torch's global generator.
    """

    def __init__(self, images: Tensor, labels: Tensor, normalization: Normalization, augment: bool = False) -> None:
        self.images = images
        self.labels = labels
        self.normalization = normalization
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return normalized images, float32 (batch, channels, height, width), and labels, int64 (batch,)."""
        index = torch.as_tensor(batch)
        images = self.images[index]
        if self.augment:
            images = flip_and_crop(images)
        return self.normalization(images), self.labels[index]


class Batches(BatchSampler):
    """Batch sampler that can skip batches to resume within an epoch.

    Attributes:
        start: Number of batches to skip; the length includes them.
    """

    start = 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self.start, None)


@dataclass(frozen=True)
class Split:
    """Training and test sets; every rank holds both in full."""

    train: Images
    test: Images
    classes: int

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.train.images.shape[1]

    @property
    def side(self) -> int:
        """Height and width of an image, in pixels."""
        return self.train.images.shape[2]


def load(spec: str) -> Split:
    """Read a data set.

    Args:
        spec: ``digits``, ``fashion-mnist:DIR`` with the folder of its IDX files (plain or .gz), or ``cifar10:DIR``
            with the folder of CIFAR-10's binary files.

    Raises:
        ValueError: The name is unknown, or a file is truncated or has the wrong format.
        FileNotFoundError: Files are missing; the message says where to get them.
    """
    name, _, folder = spec.partition(":")
    if spec == "digits":
        return _digits()
    if name == "cifar10" and folder:
        return _cifar10(Path(folder))
    if name == "fashion-mnist" and folder:
        return _fashion_mnist(Path(folder))
    raise ValueError(f"unknown data {spec!r}; known are: digits, fashion-mnist:DIR, cifar10:DIR")


def _digits() -> Split:
    """Return scikit-learn's 1797 handwritten digits: 8 x 8 pixels with values from 0 to 16."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.uint8)
    parts = train_test_split(images, labels.astype(np.int64), test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    normalization = Normalization(largest=16, mean=(0.305,), std=(0.376,))
    return Split(
        train=Images(train_images, train_labels, normalization),
        test=Images(test_images, test_labels, normalization),
        classes=10,
    )


def _cifar10(folder: Path) -> Split:
    missing = [name for name in (*CIFAR10_TRAIN, *CIFAR10_TEST) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: download the 'CIFAR-10 binary version' from {CIFAR10_PAGE}, "
            "unpack it, and pass the resulting folder cifar-10-batches-bin as cifar10:DIR"
        )
    normalization = Normalization(largest=255, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    return Split(
        train=Images(*_read_cifar10([folder / name for name in CIFAR10_TRAIN]), normalization, augment=True),
        test=Images(*_read_cifar10([folder / name for name in CIFAR10_TEST]), normalization),
        classes=CIFAR10_CLASSES,
    )


def _read_cifar10(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 (n, 3, 32, 32), and labels, int64 (n,), of all files in order."""
    records = torch.from_numpy(np.concatenate([_records(path) for path in paths]))
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the records of a file, shape (n, 3073)."""
    size = path.stat().st_size
    if size == 0 or size % CIFAR10_RECORD:
        raise ValueError(
            f"{path} is truncated: {size} bytes are not a multiple of the record size of {CIFAR10_RECORD} bytes; "
            f"download the 'CIFAR-10 binary version' again from {CIFAR10_PAGE}"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, CIFAR10_RECORD)
    if records[:, 0].max() >= CIFAR10_CLASSES:
        raise ValueError(
            f"{path} holds the label {records[:, 0].max()}, but CIFAR-10 has labels 0 to {CIFAR10_CLASSES - 1}: "
            f"it is not a file of the 'CIFAR-10 binary version' from {CIFAR10_PAGE}"
        )
    return records


def _fashion_mnist(folder: Path) -> Split:
    """Return 70,000 images of clothing, 28 x 28 pixels (Xiao et al. 2017)."""
    parts = {}
    for part, names in FASHION_MNIST.items():
        images, labels = (_read_idx(folder, name) for name in names)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{folder}: {names[0]} holds {images.shape} and {names[1]} holds {labels.shape} bytes: "
                "n images of height x width and n labels are required; download the files again"
            )
        parts[part] = torch.from_numpy(images.copy())[:, None], torch.from_numpy(labels.astype(np.int64))
    normalization = Normalization(largest=255, mean=(0.2860,), std=(0.3530,))
    return Split(train=Images(*parts["train"], normalization), test=Images(*parts["t10k"], normalization), classes=10)


def _read_idx(folder: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read an IDX file of bytes: two zeros, the type, the number of dimensions, big-endian lengths, and the data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if not plain.is_file() and not packed.is_file():
        raise FileNotFoundError(
            f"{folder} lacks {name} and {packed.name}: Debian's package dataset-fashion-mnist installs them in "
            "/usr/share/datasets/fashion-mnist (`apt-get download` and `dpkg -x` need no root)"
        )
    content = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 4 else 0
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if not dimensions or len(content) != start + math.prod(shape):
        raise ValueError(f"{folder / name} is truncated or not an IDX file of bytes: download it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def flip_and_crop(images: Tensor, padding: int = 4) -> Tensor:
    """Flip each image with probability 1/2 and shift it by up to ``padding`` pixels; new pixels are 0.

    Args:
        images: Shape (batch, channels, side, side), any dtype.
        padding: Number of zero pixels added on each side before a random window of the original size is cropped.
    """
    count, _, side, _ = images.shape
    padded = F.pad(images, [padding] * 4)
    rows = torch.randint(2 * padding + 1, (count, 1)) + torch.arange(side)
    columns = torch.randint(2 * padding + 1, (count, 1)) + torch.arange(side)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    each = torch.arange(count)
    windows = padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return windows.permute(0, 3, 1, 2)  # indexing put the channels last

"""Reading of the examples' data sets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import CIFAR10_PAGE, CIFAR10_RECORD, CIFAR10_TEST, CIFAR10_TRAIN, FASHION_MNIST, flip_and_crop, load

PER_FILE = 4


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """A folder of CIFAR-10 files with a few random records each."""
    random = np.random.default_rng(0)
    for name in (*CIFAR10_TRAIN, *CIFAR10_TEST):
        records = random.integers(0, 256, (PER_FILE, CIFAR10_RECORD), np.uint8)
        records[:, 0] = random.integers(0, 10, PER_FILE)
        records.tofile(tmp_path / name)
    return tmp_path


def test_digits_are_split_80_to_20_alike_every_time_with_every_class_on_both_sides() -> None:
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits")
    assert torch.equal(data.train.images, again.train.images)
    assert torch.equal(data.test.labels, again.test.labels)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.channels, data.side, data.classes) == (1, 8, 10)
    for part in (data.train, data.test):
        assert part.labels.unique().tolist() == list(range(10))
    both = torch.cat([data.train.images, data.test.images]).view(-1, 64).numpy()
    every = load_digits().data.astype(np.uint8)
    assert sorted(map(bytes, both)) == sorted(map(bytes, every))


def test_batches_are_normalised() -> None:
    train = load("digits").train
    images, labels = train[range(len(train))]
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02


def test_cifar10_records_are_read_in_order(cifar10: Path) -> None:
    data = load(f"cifar10:{cifar10}")
    assert (len(data.train), len(data.test)) == (len(CIFAR10_TRAIN) * PER_FILE, PER_FILE)
    assert (data.channels, data.side, data.classes) == (3, 32, 10)
    record = np.fromfile(cifar10 / CIFAR10_TRAIN[1], np.uint8)[:CIFAR10_RECORD]
    index = PER_FILE  # the second file's first record
    assert data.train.labels[index] == record[0]
    red, row, column = 0, 3, 7
    assert data.train.images[index, red, row, column] == record[1 + 32 * row + column]
    blue = 2
    assert data.train.images[index, blue, row, column] == record[1 + 2048 + 32 * row + column]


def test_cifar10_training_images_are_augmented_and_test_images_are_not(cifar10: Path) -> None:
    data = load(f"cifar10:{cifar10}")
    images, _ = data.test[[0, 1]]
    torch.testing.assert_close(images[:, 0], (data.test.images[:2, 0] / 255 - 0.4914) / 0.2470)
    torch.manual_seed(0)
    train = data.train
    images, labels = train[range(len(train))]
    assert images.shape == (len(train), 3, 32, 32)
    assert not torch.equal(images, train.normalization(train.images))
    assert torch.equal(labels, train.labels)


def test_missing_files_and_the_download_page_are_named(cifar10: Path) -> None:
    (cifar10 / "data_batch_3.bin").unlink()
    (cifar10 / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3\.bin, test_batch\.bin: .*binary version") as error:
        load(f"cifar10:{cifar10}")
    assert CIFAR10_PAGE in str(error.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((bytes(size), f"is truncated: {size} bytes") for size in (0, 1, CIFAR10_RECORD - 1, CIFAR10_RECORD + 1)),
        (b"\x0a" + bytes(CIFAR10_RECORD - 1), "holds the label 10"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_damaged_file_is_named(cifar10: Path, content: bytes, problem: str) -> None:
    (cifar10 / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_2\.bin {problem}"):
        load(f"cifar10:{cifar10}")


@pytest.mark.parametrize("spec", ["mnist", "cifar10", "cifar10:", "digits:here"])
def test_unknown_data_set_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(ValueError, match=f"unknown data '{spec}'; known are: digits, fashion-mnist:DIR, cifar10:DIR"):
        load(spec)


def test_flip_and_crop_cuts_windows_out_of_the_padded_image() -> None:
    torch.manual_seed(0)
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    padded = torch.nn.functional.pad(image, [2] * 4)[0, 0]
    windows = [padded[row : row + 8, column : column + 8] for row in range(5) for column in range(5)]
    allowed = {tuple(one.flatten().tolist()) for window in windows for one in (window, window.flip(1))}
    found = {tuple(one.flatten().tolist()) for one in flip_and_crop(image.repeat(1000, 1, 1, 1), padding=2)}
    assert found == allowed


def test_flip_and_crop_moves_all_channels_alike() -> None:
    torch.manual_seed(0)
    red = torch.randint(256, (20, 1, 32, 32), dtype=torch.uint8)
    moved = flip_and_crop(red.expand(-1, 3, -1, -1))
    assert torch.equal(moved[:, 0], moved[:, 1])
    assert torch.equal(moved[:, 0], moved[:, 2])


def idx(array: np.ndarray) -> bytes:
    """An IDX file of an array of bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def fashion_mnist(tmp_path: Path) -> Path:
    """A folder of Fashion-MNIST files with a few random pictures each, the training part packed."""
    random = np.random.default_rng(0)
    for part, names in FASHION_MNIST.items():
        arrays = random.integers(0, 256, (PER_FILE, 28, 28), np.uint8), np.arange(4, dtype=np.uint8)
        for name, content in zip(names, map(idx, arrays), strict=True):
            if part == "train":
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (tmp_path / name).write_bytes(content)
    return tmp_path


def test_fashion_mnist_is_read_plain_and_packed(fashion_mnist: Path) -> None:
    data = load(f"fashion-mnist:{fashion_mnist}")
    assert (data.channels, data.side, data.classes) == (1, 28, 10)
    for part in (data.train, data.test):
        assert part.labels.tolist() == [0, 1, 2, 3]
        assert part.images.shape == (PER_FILE, 1, 28, 28)
    content = (fashion_mnist / FASHION_MNIST["t10k"][0]).read_bytes()
    assert data.test.images.numpy().tobytes() == content[16:]


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"\0\0\x0d" + c[3:], lambda c: b"", lambda c: c[:5]]
)
def test_a_damaged_idx_file_is_refused(fashion_mnist: Path, damage: Any) -> None:
    path = fashion_mnist / FASHION_MNIST["t10k"][0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte is truncated or not an IDX file"):
        load(f"fashion-mnist:{fashion_mnist}")


def test_pictures_without_labels_are_refused(fashion_mnist: Path) -> None:
    (fashion_mnist / FASHION_MNIST["t10k"][1]).write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(ValueError, match=r"holds \(4, 28, 28\) and .* \(3,\)"):
        load(f"fashion-mnist:{fashion_mnist}")


def test_missing_files_of_fashion_mnist_are_named_with_a_place_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks train-images-idx3-ubyte and .*\.gz: .*dataset-fashion-mnist"):
        load(f"fashion-mnist:{tmp_path}")

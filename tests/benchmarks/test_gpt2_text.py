"""Text of the environment: each file once, a part held out, and a vocabulary with or without a tokenizer."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from benchmarks.gpt2.model import SHAPES, build
from benchmarks.gpt2.text import BYTES, contents, encode, environment, read_text

pytestmark = pytest.mark.full


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    for number in range(300):
        place = folder / "deep" if number % 2 else folder
        (place / f"{number:03}.py").write_text(f"def function_{number}(argument):\n    return argument + {number}\n")
    return folder


def test_each_text_is_read_once_in_the_order_of_the_paths(source):
    (source / "copy.py").write_text((source / "000.py").read_text())
    (source / "ignored.bin").write_bytes(b"content")
    (source / "latin.txt").write_bytes("é".encode("latin-1"))
    (source / "generated.h").write_bytes(b"x" * (2 << 20))
    (source / "empty.py").touch()
    found = list(contents([source, source]))
    assert len(found) == len(set(found)) == 300
    assert sorted(found) == sorted(path.read_bytes() for path in source.rglob("[0-9]*.py"))
    assert found == list(contents([source]))


def test_files_are_held_out_by_their_content(source, tmp_path):
    text = read_text(tmp_path / "cache", BYTES, [source])
    files = bytes(text.train.tolist()).split(b"\0")[:-1]
    held_out = bytes(text.held_out.tolist()).split(b"\0")[:-1]
    assert sorted(files + held_out) == sorted(contents([source]))
    assert 1 <= len(held_out) <= 20
    assert text.megabytes == sum(map(len, files + held_out)) / 1e6
    for path in source.rglob("*.py"):
        path.rename(path.with_name(f"renamed_{path.name}"))
    renamed = read_text(tmp_path / "other", BYTES, [source])
    assert bytes(renamed.held_out.tolist()).split(b"\0")[:-1] == held_out


def test_tokens_come_from_the_cache_the_second_time(source, tmp_path):
    first = read_text(tmp_path / "cache", BYTES, [source])
    second = read_text(tmp_path / "cache", BYTES, [tmp_path / "missing"])
    assert torch.equal(first.train, second.train)
    assert first.facts() == second.facts()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["text-256.npz"]


def test_a_byte_pair_encoding_makes_fewer_tokens_of_the_same_text(source, tmp_path):
    text = read_text(tmp_path / "cache", 400, [source])
    plain = read_text(tmp_path / "cache", BYTES, [source])
    assert 2 * len(text.train) < len(plain.train)
    assert 256 < int(text.train.max()) < 400
    assert (text.train == 0).sum() == (plain.train == 0).sum()  # ends of files
    assert text.facts()["tokenizer"] == "byte pair encoding"


def test_without_tokenizers_there_are_bytes_and_a_smaller_model(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = read_text(tmp_path / "cache", 400, [source])
    assert text.vocabulary == BYTES
    assert text.facts()["tokenizer"] == "bytes"
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in build("gpt2", words).parameters()) for words in (None, text.vocabulary)]
    assert sizes == [124_439_808, 124_439_808 - 768 * (50257 - BYTES)]


def test_the_vocabulary_of_gpt2_fits_its_tokens(source):
    assert max(shape.vocabulary for shape in SHAPES.values()) <= np.iinfo(np.uint16).max + 1
    ((train, held_out),) = [encode([["abc"], ["d"]], BYTES)]
    assert (train.tolist(), held_out.tolist()) == ([97, 98, 99, 0], [100, 0])


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(ValueError, match="1 files of text are too few"):
        read_text(tmp_path / "cache", BYTES, [tmp_path])


def test_the_environment_has_the_standard_library_and_torch():
    folders = environment()
    assert any((folder / "argparse.py").exists() for folder in folders)
    assert any((folder / "torch" / "nn").is_dir() for folder in folders)

"""Text that the Python environment brings, as tokens: sources, stubs, headers and documentation of all its packages.

Losses are comparable only between runs on the same tokens, as environments differ. Half of the words of such text are
Python's keywords and names that its file defines, so losses are lower than those of prose.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIXES = {".py", ".pyi", ".rst", ".md", ".txt", ".h", ".hpp", ".cuh"}
BYTES = 256  # vocabulary without a tokenizer
_LARGEST = 1 << 20  # bytes of a file; larger ones are generated
_HELD_OUT = 50  # one file of this number is held out
_SAMPLE = 16  # one file of this number trains the tokenizer
_BATCH = 256  # files that are encoded together
_END = "<|endoftext|>"  # follows every file; a zero byte without a tokenizer


@dataclass(frozen=True)
class Text:
    """Tokens of both parts.

    Attributes:
        train: Tokens of the training part, uint16 or int32 of shape (n,).
        held_out: Tokens of the held-out part.
        vocabulary: Number of distinct tokens that a model must know.
        megabytes: Size of the files.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: int
    megabytes: float

    def facts(self) -> dict[str, Any]:
        """Return what identifies the text in results."""
        content = hashlib.sha256()
        for part in (self.train, self.held_out):
            content.update(part.numpy().tobytes())
        return {
            "text": content.hexdigest()[:16],
            "megabytes": round(self.megabytes, 1),
            "train_tokens": len(self.train),
            "held_out_tokens": len(self.held_out),
            "tokenizer": "bytes" if self.vocabulary == BYTES else "byte pair encoding",
            "vocabulary": self.vocabulary,
        }


def read_text(cache: Path, vocabulary: int, folders: Sequence[Path] = ()) -> Text:
    """Return the text of folders, tokenized; the second call reads the tokens from a file.

    Args:
        cache: Folder of that file; created if it is missing.
        vocabulary: Number of tokens of a byte pair encoding, which is trained on the text; or 256, for bytes. Without
            the package tokenizers, the text has bytes, whatever was asked for.
        folders: The folders; empty: those of the environment.

    Raises:
        ValueError: A part is empty.
    """
    vocabulary = vocabulary if has_tokenizers() else BYTES
    path = cache / f"text-{vocabulary}.npz"
    if not path.exists():
        texts: tuple[list[str], list[str]] = ([], [])
        for content in contents(folders or environment()):
            texts[int(hashlib.sha256(content).hexdigest(), 16) % _HELD_OUT == 0].append(content.decode("utf-8"))
        if not all(texts):
            raise ValueError(f"{len(texts[0]) + len(texts[1])} files of text are too few: pass folders with more")
        size = sum(len(text.encode()) for part in texts for text in part)
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        train, held_out = encode(texts, vocabulary)
        np.savez(partial, train=train, held_out=held_out, size=size)
        partial.replace(path)
    with np.load(path, allow_pickle=False) as saved:
        parts = [torch.from_numpy(saved[name].astype(np.int32)) for name in ("train", "held_out")]
        return Text(parts[0], parts[1], vocabulary, int(saved["size"]) / 1e6)


def has_tokenizers() -> bool:
    """Return whether the package tokenizers, on which transformers depends, can be imported."""
    try:
        import tokenizers  # noqa: F401 - a test
    except ImportError:
        return False
    return True


def environment() -> list[Path]:
    """Return the folders of the standard library, of the installed packages and of Python's headers."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib", "include")]


def contents(folders: Iterable[Path]) -> Iterator[bytes]:
    """Yield the content of each text file once, in the order of the paths; without those that are not UTF-8."""
    seen: set[bytes] = set()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            content = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
            digest = hashlib.sha256(content).digest()
            if content and digest not in seen and _is_utf8(content):
                seen.add(digest)
                yield content


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def encode(parts: Sequence[Sequence[str]], vocabulary: int) -> list[np.ndarray[Any, Any]]:
    """Return the tokens of each part, uint16 of shape (n,); the first part trains the tokenizer."""
    if vocabulary == BYTES:
        joined = ("".join(f"{text}\0" for text in part) for part in parts)
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in joined]
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(parts[0][::_SAMPLE], trainer)
    return [np.concatenate(list(_numbers(tokenizer, part))) for part in parts]


def _numbers(tokenizer: Any, texts: Sequence[str]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the tokens of each text; a batch is encoded on all cores."""
    end = [tokenizer.token_to_id(_END)]
    for start in range(0, len(texts), _BATCH):
        for encoded in tokenizer.encode_batch_fast(texts[start : start + _BATCH]):
            yield np.array(encoded.ids + end, np.uint16)

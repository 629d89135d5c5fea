"""Text tasks: language models of words, on text that ships with Python and torch.

``lstm`` and ``transformer`` read the language reference in ``pydoc_data.topics``, ``stdlib`` and ``stdlib-10m`` the
sources of the standard library, ``headers`` the C++ headers that torch ships with. The texts differ slightly between
versions, so perplexities are comparable within one result only.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.convergence.tasks.samples import Samples, Windows

VOCABULARY = 1000
WINDOW = 32
WIDTH = 64
STDLIB_VOCABULARY, STDLIB_WIDTH, STDLIB_LAYERS = 2000, 128, 3
_GENERATED = 2**17  # minimum bytes of a header that counts as generated
_STDLIB_TEST = 1000  # windows of the test part to evaluate, spread evenly


class WordLSTM(nn.Module):
    """Language model of two LSTM layers."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of the next words, (batch, length, vocabulary), for words of shape (batch, length)."""
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.decoder(states)
        return logits


class WordTransformer(nn.Module):
    """Decoder-only language model of causal pre-norm transformer layers with learned positions."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of the next words, (batch, WINDOW, vocabulary), for words of shape (batch, WINDOW)."""
        states = self.layers(self.embedding(words) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.decoder(states)
        return logits


def stdlib_transformer() -> nn.Module:
    """Return the model of ``stdlib``, with 1,113,168 parameters."""
    return WordTransformer(STDLIB_VOCABULARY, STDLIB_WIDTH, STDLIB_LAYERS)


def larger_transformer() -> nn.Module:
    """Return the model of ``stdlib-10m``, with 9,923,600 parameters."""
    return WordTransformer(STDLIB_VOCABULARY, 320, 7)


def headers_lstm() -> nn.Module:
    """Return the model of ``headers``, with 1,362,896 parameters."""
    return WordLSTM(STDLIB_VOCABULARY, 192)


def words_of(text: str) -> list[str]:
    """Return the words and punctuation of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def read_reference(folder: Path) -> tuple[Samples, Samples]:
    """Return Python's language reference: the first 90 % for training, the rest for testing."""
    from pydoc_data.topics import topics

    del folder
    return encode(topics[topic] for topic in sorted(topics))


def encode(texts: Iterable[str]) -> tuple[Samples, Samples]:
    """Convert texts to word numbers, and split them into a training and a test part.

    Duplicate paragraphs (many describe a method in several places) count once, as a test part that repeats the training
    part would measure memorization. Blank lines separate paragraphs.

    Returns:
        The first 90 % of the words, with a window starting at every word, and the rest, cut into windows.
    """
    paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n"))
    words = [word for paragraph in paragraphs for word in words_of(paragraph)]
    end = len(words) * 9 // 10
    train, test = number([words[:end]], [words[end:]], VOCABULARY)
    return Windows(train, WINDOW, stride=1), Windows(test, WINDOW, stride=WINDOW)


def read_stdlib(folder: Path) -> tuple[Samples, Samples]:
    """Return the sources of Python's standard library, training and test part."""
    del folder
    root = Path(sysconfig.get_path("stdlib"))
    return read_files(
        root, (path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*path.parts})
    )


def read_headers(folder: Path) -> tuple[Samples, Samples]:
    """Return torch's C++ headers without the generated ones: those in folders ``ops``, and those of 128 KiB or more."""
    del folder
    root = Path(torch.__file__).parent / "include"
    written = (path for path in root.rglob("*.h") if "ops" not in path.parts and path.stat().st_size < _GENERATED)
    return read_files(root, written)


def read_files(root: Path, paths: Iterable[Path]) -> tuple[Samples, Samples]:
    """Return the words of files. A tenth of the files, by a hash of their paths in the root, is the test part."""
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(paths):
        parts[zlib.crc32(path.relative_to(root).as_posix().encode()) % 10 == 0].append(path)
    train, test = number(map(_read_words, parts[0]), map(_read_words, parts[1]), STDLIB_VOCABULARY)
    return Windows(train, WINDOW, stride=1), Windows(test, WINDOW, stride=max(WINDOW, len(test) // _STDLIB_TEST))


def _read_words(path: Path) -> list[str]:
    return words_of(path.read_text("utf-8", errors="ignore"))  # some test files are not UTF-8 on purpose


def number(train: Iterable[list[str]], test: Iterable[list[str]], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Convert words to numbers: the most frequent words of the training part from 1 on, all others 0.

    Each part has one list of words per text. ``vocabulary`` is the number of distinct numbers, including 0.

    Returns:
        The numbers of both parts, int32 of shape (words,).
    """
    # Words are first numbered by first occurrence, which takes a hundredth of the memory of the words.
    first: dict[str, int] = {}
    occurrences = array("i", (first.setdefault(word, len(first)) for word in chain.from_iterable(train)))
    counts = Counter(occurrences)
    frequent = {index: rank for rank, (index, _) in enumerate(counts.most_common(vocabulary - 1), start=1)}
    table = torch.tensor([frequent.get(index, 0) for index in range(len(first))], dtype=torch.int32)
    number_of = {word: frequent[index] for word, index in first.items() if index in frequent}
    rest = array("i", (number_of.get(word, 0) for word in chain.from_iterable(test)))
    return table[torch.tensor(occurrences)], torch.tensor(rest, dtype=torch.int32)

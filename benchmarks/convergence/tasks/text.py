"""Tasks of text: language models of words, on text that ships with Python.

``lstm`` and ``transformer`` read the language reference in ``pydoc_data.topics``, ``stdlib`` the sources of the
standard library, ``headers`` the C++ headers that torch ships with. They differ a little from one version to the next,
so perplexities compare within one result only.
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
_GENERATED = 2**17  # bytes of a file that a program wrote
_STDLIB_TEST = 1000  # stretches of the test part that are looked at, spread over it evenly


class WordLSTM(nn.Module):
    """A language model of two LSTM layers.

    Args:
        vocabulary: Number of words.
        width: Of the states.
    """

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (batch, length) to logits of their successors, shape (batch, length, vocabulary)."""
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.decoder(states)
        return logits


class WordTransformer(nn.Module):
    """A decoder-only language model of causal transformer layers, normalized first, with learned positions.

    Args:
        vocabulary: Number of words.
        width: Of the states.
        layers: Number of layers.
    """

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (batch, WINDOW) to logits of their successors, shape (batch, WINDOW, vocabulary)."""
        states = self.layers(self.embedding(words) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.decoder(states)
        return logits


def stdlib_transformer() -> nn.Module:
    """1,113,168 parameters."""
    return WordTransformer(STDLIB_VOCABULARY, STDLIB_WIDTH, STDLIB_LAYERS)


def headers_lstm() -> nn.Module:
    """1,362,896 parameters."""
    return WordLSTM(STDLIB_VOCABULARY, 192)


def words_of(text: str) -> list[str]:
    """Words and punctuation, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def read_reference(folder: Path) -> tuple[Samples, Samples]:
    """Python's language reference: the first 90 % for training, the rest for the test."""
    from pydoc_data.topics import topics

    del folder
    return encode(topics[topic] for topic in sorted(topics))


def encode(texts: Iterable[str]) -> tuple[Samples, Samples]:
    """Numbers the words of texts.

    A paragraph that occurs more than once, as many do that describe a method in several places, counts once: a test
    part that repeats the training part would measure memory.

    Args:
        texts: Texts of paragraphs with blank lines between them.

    Returns:
        The first 90 % of the words, with a stretch beginning at every word, and the rest, cut into stretches.
    """
    paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n"))
    words = [word for paragraph in paragraphs for word in words_of(paragraph)]
    end = len(words) * 9 // 10
    train, test = number([words[:end]], [words[end:]], VOCABULARY)
    return Windows(train, WINDOW, stride=1), Windows(test, WINDOW, stride=WINDOW)


def read_stdlib(folder: Path) -> tuple[Samples, Samples]:
    """The sources of Python's standard library."""
    del folder
    root = Path(sysconfig.get_path("stdlib"))
    return read_files(
        root, (path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*path.parts})
    )


def read_headers(folder: Path) -> tuple[Samples, Samples]:
    """The C++ headers of torch, but for those that a program wrote: a file for each operator, and some large ones."""
    del folder
    root = Path(torch.__file__).parent / "include"
    written = (path for path in root.rglob("*.h") if "ops" not in path.parts and path.stat().st_size < _GENERATED)
    return read_files(root, written)


def read_files(root: Path, paths: Iterable[Path]) -> tuple[Samples, Samples]:
    """The words of files; of a tenth of the files, by a hash of their paths in the root, for the test."""
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(paths):
        parts[zlib.crc32(path.relative_to(root).as_posix().encode()) % 10 == 0].append(path)
    train, test = number(map(_read_words, parts[0]), map(_read_words, parts[1]), STDLIB_VOCABULARY)
    return Windows(train, WINDOW, stride=1), Windows(test, WINDOW, stride=max(WINDOW, len(test) // _STDLIB_TEST))


def _read_words(path: Path) -> list[str]:
    return words_of(path.read_text("utf-8", errors="ignore"))  # some test files are not UTF-8 on purpose


def number(train: Iterable[list[str]], test: Iterable[list[str]], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Numbers of words: the most frequent ones of the training part from 1 on, 0 for all others.

    Args:
        train: Words of the training part, text by text.
        test: Those of the test part.
        vocabulary: How many numbers there are.

    Returns:
        The numbers of both parts, int32 of shape (words,).
    """
    # Numbers by first occurrence at first, which takes a hundredth of the memory of the words.
    first: dict[str, int] = {}
    occurrences = array("i", (first.setdefault(word, len(first)) for word in chain.from_iterable(train)))
    counts = Counter(occurrences)
    frequent = {place: rank for rank, (place, _) in enumerate(counts.most_common(vocabulary - 1), start=1)}
    table = torch.tensor([frequent.get(place, 0) for place in range(len(first))], dtype=torch.int32)
    number_of = {word: frequent[place] for word, place in first.items() if place in frequent}
    rest = array("i", (number_of.get(word, 0) for word in chain.from_iterable(test)))
    return table[torch.tensor(occurrences)], torch.tensor(rest, dtype=torch.int32)

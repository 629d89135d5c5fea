"""Three small tasks that show on two cores what a compression does to training: one of images, two of text.

``digits`` is the CNN of examples/ on scikit-learn's digits. ``lstm`` and ``transformer`` are language models of words;
their text is the language reference that ships with Python, in ``pydoc_data.topics``. The text differs a little from
one Python to the next, so perplexities compare within one result only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples import data, models

VOCABULARY = 1000
WINDOW = 32
WIDTH = 64


@dataclass(frozen=True)
class Task:
    """A model, its data and the settings at which dense training does well.

    Attributes:
        name: Its name.
        metric: ``accuracy`` or ``perplexity``, both of the test part.
        build: Makes a model from torch's global generator.
        load: Gives the training and the test part. Indexed by a whole batch, each gives inputs and labels.
        batch: Samples of a rank and step.
        lr: Learning rate after the warm-up.
        bucket_bytes: Of the gradients. One bucket for most of a model: ranks that share cores wait long for each other.
    """

    name: str
    metric: str
    build: Callable[[], nn.Module]
    load: Callable[[], tuple[Samples, Samples]]
    batch: int
    lr: float
    bucket_bytes: int


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of WINDOW words and the words that follow each, indexed by whole batches.

    Args:
        words: Word numbers, int64 of shape (n,).
        stride: From the start of one stretch to the start of the next.
    """

    def __init__(self, words: Tensor, stride: int) -> None:
        self._stretches = words.unfold(0, WINDOW + 1, stride)

    def __len__(self) -> int:
        return len(self._stretches)

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Words and their successors, both int64 of shape (batch, WINDOW)."""
        stretches = self._stretches[torch.as_tensor(batch)]
        return stretches[:, :-1], stretches[:, 1:]


Samples: TypeAlias = Windows | data.Images


class WordLSTM(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (batch, length) to logits of their successors, shape (batch, length, VOCABULARY)."""
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.decoder(states)
        return logits


class WordTransformer(nn.Module):
    """A decoder-only language model of two causal transformer layers, normalized first, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(WINDOW, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (batch, WINDOW) to logits of their successors, shape (batch, WINDOW, VOCABULARY)."""
        states = self.layers(self.embedding(words) + self.position, mask=self.mask, is_causal=True)
        logits: Tensor = self.decoder(states)
        return logits


def read_digits() -> tuple[Samples, Samples]:
    """scikit-learn's digits."""
    split = data.load("digits")
    return split.train, split.test


def read_text() -> tuple[Samples, Samples]:
    """Python's language reference: the first 90 % for training, the rest for the test."""
    from pydoc_data.topics import topics

    return encode(topics[topic] for topic in sorted(topics))


def encode(texts: Iterable[str]) -> tuple[Samples, Samples]:
    """Numbers the words of texts.

    A paragraph that occurs more than once, as many do that describe a method in several places, counts once: a test
    part that repeats the training part would measure memory. The most frequent words of the training part get the
    numbers from 1 on, all others 0.

    Args:
        texts: Texts of paragraphs with blank lines between them.

    Returns:
        The first 90 % of the words, with a stretch beginning at every word, and the rest, cut into stretches.
    """
    paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n"))
    words = [word for paragraph in paragraphs for word in re.findall(r"\w+|[^\w\s]", paragraph.lower())]
    end = len(words) * 9 // 10
    frequent = Counter(words[:end]).most_common(VOCABULARY - 1)
    number_of = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    numbers = torch.tensor([number_of.get(word, 0) for word in words])
    return Windows(numbers[:end], stride=1), Windows(numbers[end:], stride=WINDOW)


TASKS = {
    task.name: task
    for task in (
        Task("digits", "accuracy", lambda: models.cnn(1, 10), read_digits, batch=16, lr=0.05, bucket_bytes=2**20),
        Task("lstm", "perplexity", WordLSTM, read_text, batch=6, lr=1.0, bucket_bytes=2**20),
        Task("transformer", "perplexity", WordTransformer, read_text, batch=6, lr=0.15, bucket_bytes=2**20),
    )
}

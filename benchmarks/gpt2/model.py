"""GPT-2 (Radford et al. 2019) in plain torch: pre-norm layers, tied embeddings, the published initialization."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

_STD = 0.02  # of the initial weights


@dataclass(frozen=True)
class Shape:
    """Shape of a model.

    Attributes:
        layers: Number of transformer layers.
        width: Size of the hidden states.
        heads: Number of attention heads.
        vocabulary: Number of tokens.
        context: Maximum length of a sequence.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


SHAPES = {
    "gpt2": Shape(12, 768, 12),
    "gpt2-medium": Shape(24, 1024, 16),
    "tiny": Shape(2, 64, 4, vocabulary=256, context=64),
}


class Layer(nn.Module):
    """One transformer layer: causal attention and an MLP of four times the width, each after a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Return new states of shape (batch, length, width)."""
        batch, length, width = states.shape
        qkv = self.qkv(self.norm1(states)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = states + self.down(F.gelu(self.up(self.norm2(states)), approximate="tanh"))
        return changed


class GPT2(nn.Module):
    """Language model whose output layer is its token embedding.

    Args:
        shape: Shape of the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))  # two in each layer add to the states
                nn.init.normal_(parameter, std=_STD / math.sqrt(2 * shape.layers) if residual else _STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the targets, in nats; tokens and targets are int64 of (batch, length)."""
        states = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            states = layer(states)
        logits = F.linear(self.norm(states), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(name: str, vocabulary: int | None = None) -> nn.Module:
    """Return a model by its name in ``SHAPES``, initialized with torch's global generator.

    Args:
        name: Name of the shape.
        vocabulary: Number of tokens; None: the shape's.
    """
    shape = SHAPES[name]
    return GPT2(shape if vocabulary is None else replace(shape, vocabulary=vocabulary))

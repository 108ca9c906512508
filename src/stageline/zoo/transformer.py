"""The Transformer language model of GPipe's largest experiments, with any number of layers.

    tokens ─► embedding ─► layers.0 ─► layers.1 ─► … ─► head ─► logits

GPipe, arXiv 1811.06965, table 1, gives only sizes and parameter counts. With w the width and v the
vocabulary size, the counts follow if a layer has

    4w² + 4w          attention: queries, keys, values and output, with biases
    8w² + 5w          feed-forward: 4w wide inside, with biases
    4w                two LayerNorms
                      12w² + 13w = 50,358,272 for w = 2048

and the rest has 2vw + v + 2w = 131,108,096 for v = 32,000: an embedding, a LayerNorm, and a softmax
with its own weights and biases. 13 layers make 785.77 million, 785.8 in the table; without the
biases of attention it would be 785.66, without those of the softmax 785.73. A learned vector for
each of 1024 positions would add 2.1 million, so positions are encoded as sinusoids.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.model.layers import Layer, LayerSequence


def transformer(
    num_layers: int, *, vocabulary: int = 32_000, width: int = 2048, heads: int = 32
) -> LayerSequence:
    """Return a language model for sequences of any length.

    >>> with torch.device("meta"):
    ...     layers = transformer(num_layers=3)
    >>> [layer.name for layer in layers]
    ['embedding', 'layers.0', 'layers.1', 'layers.2', 'head']
    >>> sum(parameter.numel() for parameter in layers.modules.parameters())
    282182912
    """
    middle = [Layer(f"layers.{i}", _block(width, heads, num_layers)) for i in range(num_layers)]
    head = {"norm": nn.LayerNorm(width), "softmax": nn.Linear(width, vocabulary)}
    return LayerSequence(
        (
            Layer("embedding", SinusoidalEmbedding(vocabulary, width)),
            *middle,
            Layer("head", nn.Sequential(OrderedDict(head))),
        )
    )


def _block(width: int, heads: int, num_layers: int) -> nn.Sequential:
    parts = {
        "attention": CausalAttention(width, heads),
        "feed_forward": FeedForward(width, num_layers),
    }
    return nn.Sequential(OrderedDict(parts))


class SinusoidalEmbedding(nn.Module):
    """An embedding of tokens, with sinusoidal position encodings added."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x + sinusoids(x.shape[-2], x.shape[-1], x.device)


class CausalAttention(nn.Module):
    """Self-attention of each position to itself and the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)  # queries, keys and values
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # (part, sample, head, position, …)
        y = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        added: Tensor = self.outward(y.transpose(1, 2).flatten(2))
        return x + added


class FeedForward(nn.Module):
    """A feed-forward network per position, four times as wide inside."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inward = ScaledLinear(width, 4 * width, num_layers)
        self.outward = ScaledLinear(4 * width, width, num_layers)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.outward(self.inward(self.norm(x)).relu())
        return x + added


class ScaledLinear(nn.Linear):
    """A linear layer with initial weights divided by the number of layers.

    GPipe did so to keep deep models from diverging.
    """

    def __init__(self, before: int, after: int, num_layers: int) -> None:
        self.num_layers = num_layers
        super().__init__(before, after)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.div_(self.num_layers)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of each position, from the highest frequency to the lowest."""
    positions = torch.arange(length, device=device)[:, None]
    angles = positions * 1e4 ** -torch.linspace(0, 1, width // 2, device=device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)

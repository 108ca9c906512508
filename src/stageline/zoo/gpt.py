"""A small GPT in layers: an embedding, attention and MLP in turn, and a head with tied weights.

    tokens ─► embedding ─► blocks.0.attention ─► blocks.0.mlp ─► … ─► head ─► logits
                  └───────────────────── one weight ───────────────────┘

Dropout is where a branch joins the stream, so attention itself keeps its fast kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.model.layers import Layer, LayerSequence

SPREAD = 0.1  # of the embedding's weights at first


def gpt(
    *, vocabulary: int, width: int, heads: int, blocks: int, context: int, dropout: float = 0.0
) -> LayerSequence:
    """The layers, with weights from torch's own generator.

    >>> layers = gpt(vocabulary=128, width=16, heads=2, blocks=1, context=8)
    >>> [layer.name for layer in layers]
    ['embedding', 'blocks.0.attention', 'blocks.0.mlp', 'head']
    >>> layers.layers[-1].module.weight is layers.layers[0].module.tokens.weight
    True
    """
    embedding = Embedding(vocabulary, width, dropout)
    middle = [
        layer
        for i in range(blocks)
        for layer in (
            Layer(f"blocks.{i}.attention", Attention(width, heads, context, dropout)),
            Layer(f"blocks.{i}.mlp", Mlp(width, dropout)),
        )
    ]
    head = Layer("head", Head(embedding.tokens))
    return LayerSequence((Layer("embedding", embedding), *middle, head))


class Embedding(nn.Module):
    """Tokens as vectors."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.tokens(tokens))
        return x


class Attention(nn.Module):
    """Each position attends to itself and to those before it, by what and how far away they are."""

    turns: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values
        self.outward = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("turns", turns(context, width // heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        parts = parts.permute(2, 0, 3, 1, 4)  # (part, sample, head, position, …)
        queries, keys = self.turned(parts[:2])
        y = functional.scaled_dot_product_attention(queries, keys, parts[2], is_causal=True)
        added: Tensor = self.dropout(self.outward(y.transpose(1, 2).flatten(2)))
        return x + added

    def turned(self, x: Tensor) -> Tensor:
        """Vectors turned by their position's angles: the product of two tells how far apart."""
        cosines, sines = self.turns[:, : x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)


class Mlp(nn.Module):
    """Each position for itself, four times as wide inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 4 * width)
        self.outward = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.outward(self.inward(self.norm(x)).relu()))
        return x + added


class Head(nn.Module):
    """Logits: how much each position's vector is like each token's."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(tokens.embedding_dim)
        self.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)


def turns(context: int, width: int) -> Tensor:
    """Cosines and sines of angles that grow with the position, fast at first and slow at last.

    After 200 steps of the demo's size the loss was 2.10, and 2.38 with a learned vector for each
    position, even if it started as such waves.
    """
    angles = torch.arange(context)[:, None] * 1e4 ** -torch.linspace(0, 1, width // 2)
    return torch.stack([angles.cos(), angles.sin()])


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all positions, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def generate(
    layers: LayerSequence, tokens: Tensor, *, context: int, temperature: float, seed: int = 0
) -> Iterator[int]:
    """Tokens that may follow, one by one without end; layers should be in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = tokens[None]
        for layer in layers:
            x = layer.module(x)
        odds = (x[0, -1] / temperature).softmax(dim=-1)
        drawn = torch.multinomial(odds, 1, generator=generator)
        tokens = torch.cat([tokens, drawn])[-context:]
        yield int(drawn)

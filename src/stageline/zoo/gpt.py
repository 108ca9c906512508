"""A small GPT as layers: an embedding, alternating attention and MLP, and a head with tied weights.

    tokens ─► embedding ─► blocks.0.attention ─► blocks.0.mlp ─► … ─► head ─► logits
                  └───────────────────── one weight ───────────────────┘

Dropout is applied where a branch joins the residual stream, so attention keeps its fast kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.model.layers import Layer, LayerSequence

EMBEDDING_STD = 0.1  # of the initial weights


def gpt(
    *, vocabulary: int, width: int, heads: int, blocks: int, context: int, dropout: float = 0.0
) -> LayerSequence:
    """Return the layers, with weights drawn from torch's global generator.

    >>> layers = gpt(vocabulary=128, width=16, heads=2, blocks=1, context=8)
    >>> [layer.name for layer in layers]
    ['embedding', 'blocks.0.attention', 'blocks.0.mlp', 'head']
    >>> layers.layers[-1].module.weight is layers.layers[0].module.tokens.weight
    True
    """
    embedding = TokenEmbedding(vocabulary, width, dropout)
    middle = [
        layer
        for i in range(blocks)
        for layer in (
            Layer(f"blocks.{i}.attention", RotaryAttention(width, heads, context, dropout)),
            Layer(f"blocks.{i}.mlp", Mlp(width, dropout)),
        )
    ]
    head = Layer("head", Head(embedding.tokens))
    return LayerSequence((Layer("embedding", embedding), *middle, head))


class TokenEmbedding(nn.Module):
    """An embedding of tokens, with dropout."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.tokens(tokens))
        return x


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary position embeddings."""

    rotations: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values
        self.outward = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("rotations", rotations(context, width // heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        parts = parts.permute(2, 0, 3, 1, 4)  # (part, sample, head, position, …)
        queries, keys = self.rotate(parts[:2])
        y = functional.scaled_dot_product_attention(queries, keys, parts[2], is_causal=True)
        added: Tensor = self.dropout(self.outward(y.transpose(1, 2).flatten(2)))
        return x + added

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate vectors by the angles of their position: products then depend on distance."""
        cosines, sines = self.rotations[:, : x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)


class Mlp(nn.Module):
    """A feed-forward network per position, four times as wide inside."""

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
    """A projection to logits with the weight of the embedding."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(tokens.embedding_dim)
        self.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)


def rotations(context: int, width: int) -> Tensor:
    """Return cosines and sines of the rotary angles, from the highest frequency to the lowest.

    After 200 steps at the demo's size the loss was 2.10, and 2.38 with a learned vector for each
    position, even if that was initialised with such sinusoids.
    """
    angles = torch.arange(context)[:, None] * 1e4 ** -torch.linspace(0, 1, width // 2)
    return torch.stack([angles.cos(), angles.sin()])


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in nats, averaged over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def generate(
    layers: LayerSequence, tokens: Tensor, *, context: int, temperature: float, seed: int = 0
) -> Iterator[int]:
    """Sample tokens that continue the given ones, endlessly; the layers should be in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = tokens[None]
        for layer in layers:
            x = layer.module(x)
        probabilities = (x[0, -1] / temperature).softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn])[-context:]
        yield int(drawn)

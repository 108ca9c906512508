"""Models that the zoo does not have: an encoder-decoder, and one with a large embedding."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import stageline as sl
from stageline.zoo.transformer import FeedForward, SinusoidalEmbedding


class Attention(nn.Module):
    """Attention from `x` to `memory`."""

    def __init__(self, width: int, heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.queries, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.keys_and_values = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        queries = self.queries(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = self.keys_and_values(memory).unflatten(-1, (2, self.heads, -1))
        keys, values = both.permute(2, 0, 3, 1, 4)  # (part, sample, head, position, …)
        y = scaled_dot_product_attention(queries, keys, values, is_causal=self.is_causal)
        result: Tensor = self.outward(y.transpose(1, 2).flatten(2))
        return result


class SharedEmbedding(nn.Module):
    """The first layer of an encoder-decoder: one embedding for its source and its target.

    With a second embedding in a later stage, torch's zero-bubble schedules failed: "backward
    through the graph a second time".
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = SinusoidalEmbedding(vocabulary, width)

    def forward(self, source: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(source), self.embed(query)


class EncoderBlock(nn.Module):
    """Attention to all positions, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed = FeedForward(width, num_layers=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = self.feed(x + self.attention(y, y))
        return result


class DecoderBlock(nn.Module):
    """Causal attention to itself, attention to the encoder's output, a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, is_causal=True)
        self.to_memory = Attention(width, heads)
        self.feed = FeedForward(width, num_layers=1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        result: Tensor = self.feed(x + self.to_memory(self.norms[1](x), memory))
        return result


def encoder_decoder(*, vocabulary: int, width: int, heads: int, blocks: int) -> sl.LayerSequence:
    """Return a translation model; every block of its decoder reads the encoder's output.

    Inputs are `{"source": tokens, "query": tokens}`.
    """
    memory = ("memory",)
    encoder = [
        sl.Layer(f"encoder.{i}", EncoderBlock(width, heads), memory, memory) for i in range(blocks)
    ]
    decoder = [
        sl.Layer(f"decoder.{i}", DecoderBlock(width, heads), ("x", "memory")) for i in range(blocks)
    ]
    embed = SharedEmbedding(vocabulary, width)
    head = sl.Layer("head", nn.Linear(width, vocabulary))
    first = sl.Layer("embedding", embed, ("source", "query"), ("memory", "x"))
    return sl.LayerSequence((first, *encoder, *decoder, head))


class MeanOfTokens(nn.Module):
    """The mean over positions, for a classifier."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def embedding_heavy(
    *, vocabulary: int, width: int, hidden: int, blocks: int, classes: int
) -> sl.LayerSequence:
    """Return a classifier of texts: nearly all parameters are in its embedding."""
    body = [
        nn.Sequential(nn.Linear(width if i == 0 else hidden, hidden), nn.GELU())
        for i in range(blocks)
    ]
    modules = [nn.Embedding(vocabulary, width), *body, MeanOfTokens(), nn.Linear(hidden, classes)]
    return sl.LayerSequence(
        tuple(sl.Layer(f"layers.{i}", module) for i, module in enumerate(modules))
    )


class Nothing(nn.Module):
    """A layer that does almost nothing: its step is the time of the library around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def untied(layers: sl.LayerSequence) -> sl.LayerSequence:
    """Return copies of the layers without shared weights: torch cannot tie them across stages."""
    return layers.with_modules([copy.deepcopy(layer.module) for layer in layers])


def without_dropout(layers: sl.LayerSequence) -> sl.LayerSequence:
    """Return copies of the layers that draw no random numbers, so that results can be compared."""
    found = layers.copy()
    for part in found.modules.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return found


def has_dropout(layers: sl.LayerSequence) -> bool:
    """Return whether a layer draws random numbers."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in layers.modules.modules())

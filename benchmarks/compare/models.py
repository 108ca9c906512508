"""Models that the zoo does not have: an encoder-decoder, and a classifier with a large embedding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import stageline as sl
from stageline.zoo.transformer import SinusoidalEmbedding


class Decoder(nn.Module):
    """A block of a decoder: causal attention to itself, and attention to the encoder's output."""

    mask: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.block = nn.TransformerDecoderLayer(width, heads, 4 * width, **sizes)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.block(x, memory, tgt_mask=self.mask, tgt_is_causal=True)
        return y


def encoder_decoder(
    *, vocabulary: int, width: int, heads: int, blocks: int, length: int
) -> sl.LayerSequence:
    """Return a translation model; every block of its decoder reads the encoder's output.

    Inputs are `{"source": tokens, "query": tokens}`; the query has `length` of them.
    """
    sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    memory = ("memory",)
    encoder = [
        sl.Layer(
            f"encoder.{i}",
            nn.TransformerEncoderLayer(width, heads, 4 * width, **sizes),
            memory,
            memory,
        )
        for i in range(blocks)
    ]
    decoder = [
        sl.Layer(f"decoder.{i}", Decoder(width, heads, length), ("x", "memory"))
        for i in range(blocks)
    ]
    embed = [
        sl.Layer("source", SinusoidalEmbedding(vocabulary, width), ("source",), memory),
        sl.Layer("target", SinusoidalEmbedding(vocabulary, width), ("query",)),
    ]
    head = sl.Layer("head", nn.Linear(width, vocabulary))
    return sl.LayerSequence((embed[0], *encoder, embed[1], *decoder, head))


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

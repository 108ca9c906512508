"""The Transformer T(L, H, A) of GPipe's translation experiments, as layers with named values.

    source ─► embed_source ─► encoder.0 ─► … ─► encoder_norm ─► memory ──┬───────────┐
                    │ one weight                                         ▼           ▼
    prefix ─► embed_target ─────────────────────────────► x ─► decoder.0 ─► … ─► decoder.L-1
                    │ one weight                                                       │
                  head ◄───────────────────────────────────────────────────────────────┘

L encoder and L decoder layers, feed-forward networks of H, A heads. The output of the encoder is
read by every decoder layer, on whatever rank it is; the embedding is used three times. `source` and
`prefix` come with the batch, so every rank has the mask of the padding.

It is a sequence of layers and not a recorded module, because batches by number of tokens have a
hundred shapes: each would be recorded once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from experiments.translation.vocabulary import PAD
from stageline.zoo.transformer import ScaledLinear, sinusoids


@dataclass(frozen=True)
class Size:
    """T(L, H, A).

    >>> str(Size(6, 8192, 16))
    'T(6, 8192, 16)'
    """

    layers: int
    hidden: int
    heads: int

    def __str__(self) -> str:
        return f"T({self.layers}, {self.hidden}, {self.heads})"


@dataclass(frozen=True)
class Stability:
    """GPipe's two remedies for deep models.

    `scale_init` divides the initial weights of feed-forward networks by the number of layers.
    `clip` is the largest magnitude of a logit; None does not clip. The paper does not give its
    value. With 3000 tokens and a smoothing of 0.1 the best logits differ by log(0.9 × 3000 / 0.1),
    which is 10.2, so ±10 leaves room for the optimum.
    """

    scale_init: bool = True
    clip: float | None = 10.0


BOTH = Stability()


def translation_model(
    size: Size,
    *,
    vocabulary: int,
    width: int,
    dropout: float = 0.1,
    stability: Stability = BOTH,
) -> sl.LayerSequence:
    """Return the layers, with weights drawn from torch's global generator.

    >>> layers = translation_model(Size(2, 32, 2), vocabulary=64, width=16)
    >>> [layer.name for layer in layers if "memory" in layer.reads and layer.writes == ("x",)]
    ['decoder.0', 'decoder.1']
    """
    embedding = nn.Embedding(vocabulary, width)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    depth = size.layers if stability.scale_init else 1
    parts = (width, size.heads, size.hidden, depth, dropout)
    encoder = [
        sl.Layer(f"encoder.{i}", EncoderLayer(*parts), ("memory", "source"), ("memory",))
        for i in range(size.layers)
    ]
    decoder = [
        sl.Layer(f"decoder.{i}", DecoderLayer(*parts), ("x", "memory", "source"))
        for i in range(size.layers)
    ]
    return sl.LayerSequence(
        (
            sl.Layer("embed_source", Embed(embedding, dropout), ("source",), ("memory",)),
            *encoder,
            sl.Layer("encoder_norm", nn.LayerNorm(width), ("memory",), ("memory",)),
            sl.Layer("embed_target", Embed(embedding, dropout), ("prefix",)),
            *decoder,
            sl.Layer("head", Head(embedding, stability.clip)),
        )
    )


def num_parameters(layers: sl.LayerSequence) -> int:
    return sum(parameter.numel() for parameter in layers.modules.parameters())


def forward(layers: Iterable[sl.Layer], **values: Tensor) -> Tensor:
    """Run layers without a pipeline; those whose values are missing are left out.

    With `source` alone the result is the encoder's, and with `memory` the encoder is not run again.
    """
    result = torch.empty(0)
    given = set(values)
    for layer in layers:
        is_given = set(layer.writes) <= given
        if not is_given and set(layer.reads) <= values.keys():
            result = layer.module(*(values[name] for name in layer.reads))
            values[layer.writes[0]] = result
    return result


class Embed(nn.Module):
    """An embedding of tokens with sinusoidal position encodings."""

    def __init__(self, embedding: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        width = self.weight.shape[1]
        x = functional.embedding(tokens, self.weight) * sqrt(width)
        summed: Tensor = self.dropout(x + sinusoids(tokens.shape[1], width, tokens.device))
        return summed


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself, added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.outward = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, *, causal: bool = False
    ) -> Tensor:
        normed = self.norm(x)
        queries = self._split(self.query(normed))
        keys, values = self.key_value(normed if memory is None else memory).chunk(2, dim=-1)
        found = functional.scaled_dot_product_attention(
            queries, self._split(keys), self._split(values), attn_mask=mask, is_causal=causal
        )
        added: Tensor = self.dropout(self.outward(found.transpose(1, 2).flatten(2)))
        return x + added

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """A feed-forward network per position, with initial weights divided by the depth."""

    def __init__(self, width: int, hidden: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inward = ScaledLinear(width, hidden, depth)
        self.outward = ScaledLinear(hidden, width, depth)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.outward(self.inward(self.norm(x)).relu()))
        return x + added


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feed_forward = FeedForward(width, hidden, depth, dropout)

    def forward(self, memory: Tensor, source: Tensor) -> Tensor:
        fed: Tensor = self.feed_forward(self.attention(memory, None, attended(source)))
        return fed


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, and a feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.cross_attention = Attention(width, heads, dropout)
        self.feed_forward = FeedForward(width, hidden, depth, dropout)

    def forward(self, x: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        x = self.attention(x, None, None, causal=True)
        x = self.cross_attention(x, memory, attended(source))
        fed: Tensor = self.feed_forward(x)
        return fed


class Head(nn.Module):
    """Logits by the weight of the embedding, clipped."""

    def __init__(self, embedding: nn.Embedding, clip: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.weight = embedding.weight
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        return clip_logits(functional.linear(self.norm(x), self.weight), self.clip)


def attended(source: Tensor) -> Tensor:
    """Return the mask of positions that are no padding, for all heads and queries."""
    return (source != PAD)[:, None, None, :]


def clip_logits(logits: Tensor, limit: float | None) -> Tensor:
    """Return logits of a magnitude of at most `limit`.

    >>> clip_logits(torch.tensor([-12.0, 3.0, 11.0]), 10.0).tolist()
    [-10.0, 3.0, 10.0]
    """
    return logits if limit is None else logits.clamp(-limit, limit)


def smoothed_loss(smoothing: float, logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum over tokens of (1 - s) × cross-entropy + s × its mean over all tokens."""
    return functional.cross_entropy(
        logits.flatten(0, 1),
        target.flatten(),
        ignore_index=PAD,
        label_smoothing=smoothing,
        reduction="sum",
    )


def num_tokens(target: Tensor) -> Tensor:
    """Return the number of tokens that are no padding, by which the loss is divided."""
    return (target != PAD).sum()

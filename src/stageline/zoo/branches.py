"""A model with all kinds of values between layers: named inputs, shared values, None and numbers.

source ─► encode ─► memory ────┬──────────────────┬──────────────────┐
  mask ─────┘ └───► bias ──────┤                  │                  │
              └───► length ────┤                  │                  │
 query ─► embed ──► x ──► attend.0 ─► feed.0 ─► attend.1 ─► …  attend.n ─► feed.n ─► head ─► x
 scale ────────────────────────┘──────────────────┘──────────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stageline.model.layers import Layer, LayerSequence


def branches(width: int, classes: int, num_readers: int = 3) -> LayerSequence:
    """Return a model for named inputs: a source with an optional mask, a query and a scale.

    Inputs are `{"source": [n, t, w], "mask": None or [n, t], "query": [n, w], "scale": 1.0}`.

    >>> layers = branches(width=4, classes=2)
    >>> [layer.name for layer in layers if "memory" in layer.reads]
    ['attend.0', 'attend.1', 'attend.2']
    """
    encode = Layer("encode", Encode(width), ("source", "mask"), ("memory", "bias", "length"))
    reads = ("x", "memory", "bias", "length", "scale")
    pairs = [
        (Layer(f"attend.{i}", Attend(width), reads), Layer(f"feed.{i}", Feed(width)))
        for i in range(num_readers)
    ]
    body = [layer for pair in pairs for layer in pair]
    embed, head = Layer("embed", nn.Linear(width, width), ("query",)), nn.Linear(width, classes)
    return LayerSequence((encode, embed, *body, Layer("head", head)))


class Encode(nn.Module):
    """Write a tensor, a bias (None if there is no mask), and the length of the source."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        bias = None if mask is None else torch.log(mask)  # 0 hides a position, 1 keeps it
        return torch.tanh(self.linear(source)), bias, source.shape[1]


class Attend(nn.Module):
    """Attention of a single query to the memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(
        self, x: Tensor, memory: Tensor, bias: Tensor | None, length: int, scale: float
    ) -> Tensor:
        keys, values = self.key_value(memory).chunk(2, dim=-1)
        scores = (keys @ self.query(x).unsqueeze(-1)).squeeze(-1) * (scale / length**0.5)
        weights = torch.softmax(scores if bias is None else scores + bias, dim=-1)
        found: Tensor = (weights.unsqueeze(1) @ values).squeeze(1)
        return x + found


class Feed(nn.Module):
    """A residual feed-forward layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return fed

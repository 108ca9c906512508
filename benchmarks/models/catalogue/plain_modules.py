"""Sequence models of plain torch, as one finds them in people's own code."""

from __future__ import annotations

import torch
from benchmarks.models.case import Batch, Case, classes, noise, tokens
from benchmarks.models.catalogue.losses import cross_entropy, token_loss
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody does
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class LstmLanguageModel(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.drop = nn.Dropout(0.1)
        self.rnns = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for rnn in self.rnns:
            y, _ = rnn(x)
            x = x + self.drop(y)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class MasksAndBranches(nn.Module):
    """Blocks with a mask, a branch on the data, a token at the root and two outputs."""

    scale: Tensor

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gate = nn.Linear(width, width)
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None and not bool(mask.all()):
            keep[:, 1:] = mask.bool()
        for number, block in enumerate(self.blocks):
            x = x + F.gelu(block(x * keep[..., None]))
            if number == 1:
                x = x * torch.sigmoid(self.gate(x)) * self.scale
        return {"logits": self.head(x[:, 1:]), "pooled": x[:, 0]}


class SharedBlock(nn.Module):
    """One block that is applied several times, as in ALBERT and universal transformers."""

    def __init__(self, width: int = 16, times: int = 4) -> None:
        super().__init__()
        self.times = times
        self.embed = nn.Embedding(64, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.times):
            x = self.block(x)
        return F.linear(self.norm(x), self.embed.weight)


class MixtureOfExperts(nn.Module):
    """Tokens go to one of several experts, by hard routing, with a loss that balances them."""

    def __init__(self, width: int = 16, depth: int = 3, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(depth))
        self.num_experts = experts
        self.experts = nn.ModuleList(nn.Linear(width, experts * width) for _ in range(depth))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        balance = x.new_zeros(())
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights = router(x).softmax(dim=-1)
            best, choice = weights.max(dim=-1)
            every = experts(x).unflatten(-1, (self.num_experts, -1))
            chosen = every.take_along_dim(choice[..., None, None], dim=-2).squeeze(-2)
            x = x + best[..., None] * chosen
            balance = balance + weights.mean(dim=(0, 1)).square().sum()
        return token_loss(self.head(x), labels) + 0.01 * balance


class PackedSequences(nn.Module):
    """An LSTM over sequences of several lengths, packed."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        x = torch.tanh(self.hidden(x.sum(dim=1)))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class NotesInAttributes(nn.Module):
    """Keeps what blocks return in a list of its own, and a penalty, before it uses both."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 32, dropout=0.1, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 64)
        self.features: list[Tensor] = []
        self.penalty: Tensor | float = 0.0

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.features.clear()
        self.penalty = 0.0
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            self.features.append(x)
            self.penalty = self.penalty + x.square().mean()
        logits = self.head(torch.stack(self.features).mean(dim=0))
        return logits, token_loss(logits, labels) + 0.01 * self.penalty


def _tokens(num_samples: int, size: int) -> Batch:
    ids = tokens(num_samples, 9 + 3 * size)
    return ids, ids.roll(-1, 1)


def _labelled(num_samples: int, size: int) -> Batch:
    ids, labels = _tokens(num_samples, size)
    return {"ids": ids, "labels": labels}, None


def _lengths(num_samples: int, size: int) -> Batch:
    ids, number = tokens(num_samples, 9 + 3 * size), tokens(num_samples, 1)[:, 0]
    return {"ids": ids, "lengths": number % (8 + 3 * size) + 2}, classes(num_samples)


def _masked(num_samples: int, size: int) -> Batch:
    ids, labels = _tokens(num_samples, size)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0  # so that one micro-batch goes another way than the others
    return {"ids": ids, "mask": mask}, labels


def _pairs(num_samples: int, size: int) -> Batch:
    source, target = noise(num_samples, 8 + size, 16), noise(num_samples, 6 + size, 16)
    return (source, target), target.roll(-1, 1)


def _loss_of_both(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return token_loss(output["logits"], target) + output["pooled"].pow(2).mean()


def _transformer() -> Case:
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.1, batch_first=True)
    return Case(model, _pairs, F.mse_loss)


CASES = {
    "nn.Transformer": _transformer,
    "LSTM language model": lambda: Case(LstmLanguageModel(), _tokens, token_loss),
    "masks and branches": lambda: Case(MasksAndBranches(), _masked, _loss_of_both),
    "shared block": lambda: Case(SharedBlock(), _tokens, token_loss),
    "packed sequences": lambda: Case(PackedSequences(), _lengths, cross_entropy),
    "notes in attributes": lambda: Case(NotesInAttributes(), _labelled),
    "hard mixture of experts": lambda: Case(MixtureOfExperts(), _labelled),
}

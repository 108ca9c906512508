"""Graph networks and recommenders of plain torch."""

from __future__ import annotations

import torch
from benchmarks.models.case import Batch, Case, classes, noise, tokens
from benchmarks.models.catalogue.losses import cross_entropy, token_loss
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody does


class Recommender(nn.Module):
    """A DLRM: embeddings of categories, an MLP of numbers, and their products."""

    def __init__(self, width: int = 8, tables: int = 5) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(rows, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(len(rows), len(rows), offset=-1)
        return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(1)  # type: ignore[no-any-return]


class WideAndDeep(nn.Module):
    """A factorisation machine beside an MLP, over the same embeddings."""

    def __init__(self, fields: int = 5, width: int = 8) -> None:
        super().__init__()
        self.linear, self.embed = nn.Embedding(100, 1), nn.Embedding(100, width)
        self.deep = nn.Sequential(
            *(nn.Linear(fields * width, 16), nn.BatchNorm1d(16), nn.ReLU()),
            *(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        first = self.linear(ids).sum(dim=1)
        x = self.embed(ids)
        second = 0.5 * (x.sum(dim=1).square() - x.square().sum(dim=1)).sum(dim=1, keepdim=True)
        return (first + second + self.deep(x.flatten(1))).squeeze(1)  # type: ignore[no-any-return]


class SequentialRecommender(nn.Module):
    """A SASRec: what a user did before, with weights of the items in the first and last layer."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(64, width, padding_idx=0), nn.Embedding(32, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 32, batch_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.items(ids) + self.places(places))
        mask = torch.ones(len(places), len(places), dtype=torch.bool, device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.norm(x) @ self.items.weight.t()  # type: ignore[no-any-return]


class GraphNetwork(nn.Module):
    """Message passing over an adjacency matrix of each sample."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.convs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.readout = nn.Linear(width, 5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(dim=-1, keepdim=True).clamp(min=1)
        x = self.embed(nodes)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(x + F.relu((adjacency @ conv(x)) / degree))
        return self.readout(x.mean(dim=1))  # type: ignore[no-any-return]


class GraphAttention(nn.Module):
    """Each node attends to its neighbours; edges are a mask."""

    def __init__(self, width: int = 12, depth: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scores = nn.ParameterList(nn.Parameter(torch.randn(2, width)) for _ in range(depth))
        self.drop = nn.Dropout(0.1)
        self.readout = nn.Linear(width, 5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        x = self.embed(nodes)
        missing = adjacency.eq(0) & ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        for value, score in zip(self.values, self.scores, strict=True):
            y = value(x)
            pairs = (y @ score[0])[:, :, None] + (y @ score[1])[:, None]
            weights = F.leaky_relu(pairs).masked_fill(missing, -torch.inf).softmax(dim=-1)
            x = x + F.elu(self.drop(weights) @ y)
        return self.readout(x.amax(dim=1))  # type: ignore[no-any-return]


def _clicks(num_samples: int, size: int) -> Batch:
    categories = tokens(num_samples, 15 + 5 * size).view(num_samples, 5, -1) % 20
    return (noise(num_samples, 4), categories), noise(num_samples)


def _fields(num_samples: int, _: int) -> Batch:
    return tokens(num_samples, 5, 100), noise(num_samples)


def _history(num_samples: int, size: int) -> Batch:
    ids = tokens(num_samples, 9 + 3 * size)
    return ids, ids.roll(-1, 1)


def _graphs(num_samples: int, size: int) -> Batch:
    number = 7 + size
    edges = (noise(num_samples, number, number) > 0).float()
    return {"nodes": noise(num_samples, number, 6), "adjacency": edges}, classes(num_samples)


CASES = {
    "DLRM": lambda: Case(Recommender(), _clicks, F.mse_loss),
    "wide and deep": lambda: Case(WideAndDeep(), _fields, F.mse_loss),
    "SASRec": lambda: Case(SequentialRecommender(), _history, token_loss),
    "graph network": lambda: Case(GraphNetwork(), _graphs, cross_entropy),
    "graph attention": lambda: Case(GraphAttention(), _graphs, cross_entropy),
}

"""Models and files that the tests of load_pretrained and of exported folders share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import stageline as sl
from stageline.model.layers import Layer
from stageline.zoo.gpt import Head, loss

EMBEDDING, TIED = "model.embed.weight", "head.weight"


class Scaled(nn.Module):
    """Has a scalar, an empty tensor, and a table that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)

    def reset_buffers(self) -> None:
        self.table.copy_(torch.arange(8.0))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table  # type: ignore[operator]


def layers() -> list[Layer]:
    embedding = nn.Embedding(11, 8)
    return [
        Layer("model.embed", embedding),
        Layer("model.layers.0", nn.Linear(8, 8)),
        Layer("model.layers.1", nn.Linear(8, 8)),
        Layer("model.norm", nn.BatchNorm1d(5)),
        Layer("model.scaled", Scaled()),
        Layer("head", Head(embedding)),
    ]


def build(num_ranks: int = 2, *, seed: int = 0, on_meta: bool = False, **more: Any) -> sl.Pipeline:
    torch.manual_seed(seed)
    with torch.device("meta" if on_meta else "cpu"):
        made = layers()
    options: dict[str, Any] = {"num_microbatches": 2, "backend": "serial"} | more
    return sl.Pipeline(made, loss, num_ranks=num_ranks, **options)


def uninitialized(num_ranks: int = 2) -> sl.Pipeline:
    return build(num_ranks, on_meta=True, init_fn=lambda _: None)


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, 11, (2, 4, 5), generator=torch.Generator().manual_seed(0))
    return x, y


def tensors(pipe: sl.Pipeline) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}


def write_shards(folder: Path, state: Mapping[str, Tensor], num_files: int, **extra: Any) -> Path:
    """Write files and an index as transformers does, with every n-th tensor in the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {n: t for i, (n, t) in enumerate(state.items()) if i % num_files == number}
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    write_index(folder, places, **extra)
    return folder


def write_index(folder: Path, places: Mapping[str, Any], **extra: Any) -> None:
    fields = {"metadata": {"total_size": 0}, "weight_map": dict(places)} | extra
    (folder / "model.safetensors.index.json").write_text(json.dumps(fields))


def assert_state(pipe: sl.Pipeline, wanted: Mapping[str, Tensor]) -> None:
    found = tensors(pipe)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name

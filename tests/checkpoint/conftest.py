"""Fixtures of all tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.pipelines import (
    pipeline,
    train,
)
from torch.optim import AdamW

import stageline as sl


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers are tiny; threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipe() -> sl.Pipeline:
    return pipeline()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    train(pipe, optimizer, range(2))
    sl.save(tmp_path, pipe, optimizer, step=2, data={"seen": 18})
    return tmp_path

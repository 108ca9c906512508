"""How gradients are grouped for their sum over replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stageline.runtime.engine import replicas


def test_buckets_are_filled_by_bytes_and_have_one_type_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "BUCKET", 100)
    single = [nn.Parameter(torch.zeros(10)) for _ in range(7)]  # 40 bytes each
    double = [nn.Parameter(torch.zeros(2, 5, dtype=torch.float64)) for _ in range(3)]
    found = replicas._buckets([*single, *double])
    assert [len(bucket) for bucket in found] == [3, 3, 1, 2, 1]
    assert [id(p) for bucket in found for p in bucket] == [*map(id, [*single, *double])]

"""What `print(pipe)` shows."""

from __future__ import annotations

from textwrap import dedent

import torch
from torch import Tensor, nn

import stageline as sl


class Skip(nn.Module):
    """The last layer reads the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.first(x)
        for layer in self.middle:
            x = layer(x).relu()
        joined: Tensor = self.last(torch.cat([x, skip], dim=1))
        return joined


def test_a_pipeline_prints_its_stages_and_what_passes_between_them() -> None:
    pipe = sl.Pipeline(
        Skip(),
        nn.functional.mse_loss,
        example_inputs=torch.ones(8, 4),
        num_ranks=3,
        num_microbatches=2,
        balance=[1, 2, 1],
        backend="serial",
    )
    assert repr(pipe) == dedent("""\
        Skip: 4 layers in 3 stages on 3 ranks, 1f1b, 2 micro-batches
        cut by balance=[1, 2, 1]
        stage 0 on rank 0, 25% of the cost
          first                20 parameters
          └─ first[0], float32[4, 4], 64B, to stages 1, 2
        stage 1 on rank 1, 50% of the cost
          middle.0             20 parameters
          middle.1             20 parameters
          └─ middle.1[0], float32[4, 4], 64B, to stage 2
        stage 2 on rank 2, 25% of the cost
          last                 18 parameters""")

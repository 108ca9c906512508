"""Move parameters with their optimizer state to another optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from stageline.runtime.placement.move_layers import OptimizerState


def optimizer_of(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer with groups by the first letter of the parameters' names."""
    groups = [[pair for pair in named if pair[0].startswith(letter)] for letter in "ab"]
    return SGD([{"params": group} for group in groups], 0.1, momentum=0.9)


def test_a_parameter_arrives_in_its_group_with_its_name_gradient_and_momentum() -> None:
    zero, one, two, three = (nn.Parameter(torch.full((2,), float(n))) for n in range(4))
    source = optimizer_of([("a1", one), ("b2", two)])
    target = optimizer_of([("a0", zero), ("b3", three)])
    two.grad = torch.ones(2)
    source.step()
    leaving, arriving = OptimizerState(source), OptimizerState(target)
    parcel = leaving.pack(two)
    there = nn.Parameter(torch.zeros(2))
    arriving.unpack(there, parcel)
    leaving.drop(two)
    leaving.restore_groups([one])
    arriving.restore_groups([zero, there, three])
    assert [group["param_names"] for group in source.param_groups] == [["a1"], []]
    assert [group["param_names"] for group in target.param_groups] == [["a0"], ["b2", "b3"]]
    assert [id(p) for p in target.param_groups[1]["params"]] == [id(there), id(three)]
    assert torch.equal(there, two)
    assert torch.equal(target.state[there]["momentum_buffer"], torch.ones(2))
    assert there.grad is not two.grad
    assert not source.state

"""What a PyTorch user expects of a model: named parameters, zero_grad, load_state_dict, with."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import stageline as sl


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def pipeline(given: nn.Module) -> sl.Pipeline:
    return sl.Pipeline(given, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")


def test_pipeline_has_at_most_sixteen_parameters() -> None:
    assert len(inspect.signature(sl.Pipeline).parameters) <= 16


def test_internals_are_private() -> None:
    public = {name for name in vars(pipeline(model())) if not name.startswith("_")}
    assert public == {"model"}


def test_named_parameters_have_the_names_of_the_model() -> None:
    whole = model()
    found = dict(pipeline(whole).named_parameters())
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(found[name] is parameter for name, parameter in whole.named_parameters())


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_resets_gradients(to_none: bool) -> None:
    pipe = pipeline(model())
    pipe.step(torch.randn(4, 3), torch.randn(4, 2))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.zero_grad(set_to_none=to_none)
    for parameter in pipe.parameters():
        assert (parameter.grad is None) if to_none else not parameter.grad.any()  # type: ignore[union-attr]


def test_load_state_dict_copies_the_state_of_a_whole_model() -> None:
    source, target = model(), model()
    source(torch.randn(5, 3))  # moves the running statistics
    pipe = pipeline(target)
    pipe.load_state_dict(source.state_dict())
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
    weights = list(target.parameters())
    assert all(a is b for a, b in zip(pipe.parameters(), weights, strict=True))


def test_a_state_with_other_names_or_shapes_is_refused_unless_told_otherwise() -> None:
    pipe, state = pipeline(model()), model().state_dict()
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with pytest.raises(
        sl.ModelError, match=r"^the state has '7\.weight', but the model has no such"
    ):
        pipe.load_state_dict({**state, "7.weight": torch.zeros(1)})
    with pytest.raises(sl.ModelError, match=r"^the state lacks '2\.bias', but the model has it"):
        pipe.load_state_dict({name: t for name, t in state.items() if name != "2.bias"})
    with pytest.raises(
        sl.ModelError, match=r"^'2\.weight' has shape \(1, 1\) in the state, but \(2"
    ):
        pipe.load_state_dict({**state, "2.weight": torch.zeros(1, 1)})
    pipe.load_state_dict({"7.weight": torch.zeros(1)}, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


def test_the_end_of_a_with_block_closes_the_pipeline() -> None:
    with sl.Pipeline(model(), mse_loss, num_ranks=2, num_microbatches=2) as pipe:
        pipe.step(torch.randn(4, 3), torch.randn(4, 2))
    with pytest.raises(sl.ModelError, match="the pipeline is closed"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 2))

"""The reference loop itself, compared with plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from stageline.model.layers import LayerSequence
from stageline.zoo.plain import statistics, train_plainly


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(length, 4), torch.randn(length, 2)) for length in (9, 11, 3)]


def train(model: nn.Sequential, num_microbatches: int, learning_rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    layers = LayerSequence.of(model)
    train_plainly(layers, mse_loss, optimizer, batches(), num_microbatches=num_microbatches)


def train_with_plain_torch(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, target in batches():
        optimizer.zero_grad()
        mse_loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


def chain() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def tied() -> nn.Sequential:
    """Return a model with one weight in three layers."""
    torch.manual_seed(2)
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    second.weight = third.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Linear(4, 2))


def test_one_micro_batch_is_bit_identical_to_plain_torch() -> None:
    ours, theirs = chain(), chain()
    train(ours, num_microbatches=1)
    train_with_plain_torch(theirs)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


@pytest.mark.parametrize("num_microbatches", [1, 4, 10])
@pytest.mark.parametrize("make", [chain, tied])
def test_uneven_micro_batches_give_the_mean_of_the_whole_batch(
    make: type[nn.Sequential], num_microbatches: int
) -> None:
    ours, theirs = make(), make()
    train(ours, num_microbatches)
    train_with_plain_torch(theirs)
    for name, tensor in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], tensor)  # added in another order


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("num_microbatches", [1, 4, 10])
def test_running_statistics_are_those_of_the_whole_batch(
    num_microbatches: int, momentum: float | None
) -> None:
    """With a learning rate of 0, the first layer's input does not depend on the micro-batches."""
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2, momentum=momentum))
    whole = copy.deepcopy(model)
    train(model.append(nn.Flatten()).append(nn.Linear(4, 2)), num_microbatches, learning_rate=0.0)
    for inputs, _ in batches():
        whole(inputs)
    for name, tensor in whole.state_dict().items():
        if "weight" not in name and "bias" not in name:
            assert_close(model.state_dict()[name], tensor)


def test_running_statistics_of_bfloat16_inputs_are_kept_in_float32() -> None:
    """As torch's own are, under autocast."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4).bfloat16()
    found, wanted = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    with statistics([found]):
        found(inputs)
    wanted(inputs)
    for name, tensor in wanted.state_dict().items():
        assert_close(found.state_dict()[name], tensor)


def test_dropout_depends_on_step_micro_batch_and_layer_and_keeps_the_generator_state() -> None:
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach() == 0)
            return x

    drops = [nn.Dropout(0.5), Watch()]
    before = torch.random.get_rng_state()
    ones = [(torch.ones(6, 8), torch.zeros(6, 8))] * 2
    weight = nn.Linear(8, 8)
    torch.random.set_rng_state(before)
    train_plainly(
        LayerSequence.of([*drops, nn.Dropout(0.5), Watch(), weight]),
        mse_loss,
        torch.optim.SGD(weight.parameters()),
        ones,
        num_microbatches=2,
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    masks = {tuple(mask.flatten().tolist()) for mask in seen}
    assert len(masks) == len(seen) == 8

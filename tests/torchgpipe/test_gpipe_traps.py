"""Uses of a `GPipe` that trip pipelines: errors, randomness, in-place layers, calls in a row."""

from __future__ import annotations

import copy
import gc
import threading
import time
from typing import Any

import pytest
import torch
from tests.torchgpipe.skip_layers import Pop, Stash
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.errors import ModelError
from stageline.torchgpipe import GPipe
from stageline.torchgpipe.skip import skippable

MODES = ("always", "except_last", "never")


class OwnError(Exception):
    """An error of the user's, which needs two arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


class Raise(nn.Module):
    """Raises while it is told to."""

    is_broken = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_broken:
            raise OwnError(1, 2)
        return x


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        raise OwnError(3, 4)


class Call(nn.Module):
    """A layer of the user's own that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


def gpipe(*layers: nn.Module, **options: Any) -> GPipe:
    """Return a pipeline with a partition for each layer."""
    torch.manual_seed(0)
    num_layers = len(layers)
    return GPipe(nn.Sequential(*layers), [1] * num_layers, devices=["cpu"] * num_layers, **options)


def test_what_a_layer_raises_is_raised_and_says_where() -> None:
    model = gpipe(nn.Linear(2, 2), broken := Raise(), nn.Linear(2, 2), chunks=3)
    for _ in range(2):
        with pytest.raises(OwnError) as caught:
            model(torch.ones(6, 2))
    assert caught.value.args == (1, 2)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert caught.value.__notes__ == ["rank 1 failed in layer '1' at 1F0 (forward, micro-batch 0)"]
    broken.is_broken = False
    model(torch.ones(6, 2)).sum().backward()


def test_what_a_layer_raises_in_its_backward_is_raised_there() -> None:
    model = gpipe(nn.Linear(2, 2), Call(RaiseInBackward.apply), nn.Linear(2, 2), chunks=3)
    output = model(torch.ones(6, 2))
    with pytest.raises(OwnError) as caught:
        output.sum().backward()
    assert "at 1B2 (backward" in caught.value.__notes__[0]


def test_layers_before_the_one_that_failed_stop() -> None:
    ran: list[int] = []

    def count(x: Tensor) -> Tensor:
        time.sleep(0.01)
        ran.append(1)
        return x

    model = gpipe(Call(count), Raise(), chunks=1000)
    with pytest.raises(OwnError):
        model(torch.rand(1000, 1))
    stopped = len(ran)
    assert stopped < 500
    time.sleep(0.05)
    assert len(ran) == stopped


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_recomputed_dropout_has_the_mask_of_the_first_time(checkpoint: str) -> None:
    layers = [nn.Dropout(0.3), Call(lambda x: F.dropout(x, 0.3)), nn.Dropout(0.3)]
    model = gpipe(*layers, chunks=4, checkpoint=checkpoint)
    x = torch.ones(16, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert 0 < int((y == 0).sum()) < y.numel()
    assert torch.equal(y, x.grad)  # type: ignore[arg-type]


def test_torch_manual_seed_decides_random_numbers() -> None:
    model = gpipe(nn.Dropout(0.5), nn.Linear(8, 8), chunks=2)
    x = torch.ones(8, 8)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(seed)
        return model(x), model(x), torch.rand(1)

    first, again, other = draw(1), draw(1), draw(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    model = gpipe(nn.Linear(8, 8), Call(torch.relu), chunks=2)
    before = torch.get_rng_state()
    model(torch.ones(8, 8)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mode_is_followed_inside_of_layers_with_skips() -> None:
    class Drop(Stash.module_cls):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Any:
            output = yield from super().forward(x)
            return F.dropout(output, 0.5, self.training)

    model = gpipe(skippable(stash=["skip"])(Drop)(), Pop(), chunks=2)
    x = torch.ones(4, 3)
    assert torch.equal(model.eval()(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), first)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_batches_of_any_length_give_the_numbers_of_a_plain_loop(
    checkpoint: str, length: int
) -> None:
    model = gpipe(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), chunks=4, checkpoint=checkpoint)
    plain = copy.deepcopy(nn.Sequential(*model))
    x = torch.rand(length, 4)
    loss = model(x).pow(2).sum()
    loss.backward()
    for part in reversed(x.chunk(4)):
        plain(part).pow(2).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_may_change_their_inputs_in_place(checkpoint: str) -> None:
    """torchgpipe refuses it, or computes wrong gradients, where such a layer is recomputed."""
    layers = [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)]
    model = gpipe(*layers, chunks=2, checkpoint=checkpoint)
    plain = copy.deepcopy(nn.Sequential(*model))
    x = torch.randn(4, 4)
    before = x.clone()
    model(x).sum().backward()
    assert torch.equal(x, before)
    for part in x.chunk(2):
        plain(part.clone()).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", MODES)
def test_two_calls_may_precede_their_backwards(checkpoint: str) -> None:
    model = gpipe(
        nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), chunks=2, checkpoint=checkpoint
    )
    first, second = torch.rand(4, 4), torch.rand(4, 4)
    torch.manual_seed(1)
    a, b = model(first), model(second)
    b.pow(2).sum().backward()
    a.pow(2).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    model(first).pow(2).sum().backward()
    model(second).pow(2).sum().backward()
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_a_graph_is_recorded_in_evaluation_and_not_under_no_grad() -> None:
    model = gpipe(nn.Linear(2, 2), nn.BatchNorm1d(2), chunks=2).eval()
    x = torch.ones(4, 2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.no_grad():
        assert not model.train()(x).requires_grad


def test_autocast_reaches_the_layers() -> None:
    """In torchgpipe it does not: it is a setting of the caller's thread."""
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2), chunks=2, checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.ones(4, 2))
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_hooks_of_partitions_and_layers_are_called() -> None:
    called: list[str] = []
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2), chunks=2, checkpoint="never")
    model(torch.ones(4, 2))
    model[1].register_forward_hook(lambda *_: called.append("layer"))
    handle = model.partitions[0].register_forward_hook(lambda *_: called.append("partition"))
    model(torch.ones(4, 2)).sum().backward()
    assert sorted(called) == ["layer", "layer", "partition", "partition"]
    handle.remove()
    model(torch.ones(4, 2))
    assert called.count("partition") == 2


def test_a_layer_may_be_replaced_between_calls() -> None:
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(4, 2))
    partition = model.partitions[1]
    assert isinstance(partition, nn.Sequential)
    partition[0] = nn.Linear(2, 5)
    assert model(torch.ones(4, 2)).shape == (4, 5)


def test_frozen_layers_get_no_gradients() -> None:
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2), chunks=2)
    model.partitions[0].requires_grad_(False)
    model(torch.ones(4, 2)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None
    assert not model.requires_grad_(False)(torch.ones(4, 2)).requires_grad


def test_it_is_part_of_a_larger_model() -> None:
    inner = gpipe(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), chunks=2)
    model = nn.Sequential(nn.Linear(2, 2), inner, nn.Linear(2, 1))
    model(torch.ones(4, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_second_backward_through_one_output_is_refused() -> None:
    loss = gpipe(nn.Linear(2, 2), chunks=2)(torch.ones(4, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="backward ran twice"):
        loss.backward()


def test_threads_end_with_the_model() -> None:
    before = {*threading.enumerate()}
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2), chunks=2)
    model(torch.ones(4, 2)).sum().backward()
    started = {*threading.enumerate()} - before
    assert len(started) == 2
    del model
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in started)


def test_other_options_do_not_pile_up_threads() -> None:
    model = gpipe(nn.Linear(2, 2), nn.Linear(2, 2))
    for chunks in range(1, 10):
        model.chunks = chunks
        model(torch.ones(10, 2)).sum().backward()
    assert len(model._runners) == 4


def test_several_threads_may_call_one_model() -> None:
    model = gpipe(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), chunks=4)
    x = torch.rand(16, 8)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    found: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            own = x.detach().clone().requires_grad_()
            model(own).sum().backward()
            assert own.grad is not None
            found.append(own.grad)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 60
    assert all(torch.equal(gradient, expected) for gradient in found)

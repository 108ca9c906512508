"""The same models through torchgpipe 0.0.7, if it is installed, and through ours.

Outputs, gradients of inputs and, with one or two micro-batches, those of weights have the same
bits. With more micro-batches torchgpipe adds up gradients from the last to the first and Stageline
from the first to the last, and the test has the sums of both orders.

torchgpipe's running statistics are right without recomputation and without deferral: a recomputed
forward updates its BatchNorm a second time, and its deferred variance is biased (divided by n
instead of n - 1), in float32 from a sum of squares.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stageline.torchgpipe
import stageline.torchgpipe.balance
import stageline.torchgpipe.skip

torchgpipe: Any = pytest.importorskip("torchgpipe", minversion=None)
THEIRS = SimpleNamespace(GPipe=torchgpipe.GPipe, skip=pytest.importorskip("torchgpipe.skip"))
OURS = SimpleNamespace(GPipe=stageline.torchgpipe.GPipe, skip=stageline.torchgpipe.skip)
BALANCES = ([6], [2, 4], [1, 3, 2])
MODES = ("always", "except_last", "never")
NUM_SAMPLES = 8


def unet(library: SimpleNamespace, seed: int = 0) -> nn.Sequential:
    """A model with BatchNorm and two skips, one within the other."""
    skip = library.skip

    @skip.skippable(stash=["outer"])  # type: ignore[untyped-decorator, unused-ignore]
    class Encode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            yield skip.stash("outer", x)
            return self.conv(x)  # type: ignore[no-any-return]

    @skip.skippable(stash=["inner"])  # type: ignore[untyped-decorator, unused-ignore]
    class Middle(Encode.module_cls):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 3, 1)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            x = self.conv(x)
            yield skip.stash("inner", x.sigmoid())
            return x

    @skip.skippable(pop=["outer", "inner"])  # type: ignore[untyped-decorator, unused-ignore]
    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            inner = yield skip.pop("inner")
            outer = yield skip.pop("outer")
            return self.conv(x) * inner + outer  # type: ignore[no-any-return]

    torch.manual_seed(seed)
    return nn.Sequential(
        Encode(), nn.BatchNorm2d(4), nn.ReLU(), Middle(), nn.BatchNorm2d(3), Decode()
    )


class Outcome(NamedTuple):
    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def trained(library: SimpleNamespace, balance: list[int], **options: Any) -> Outcome:
    """Return what one forward and backward gives."""
    model = library.GPipe(unet(library), balance, devices=["cpu"] * len(balance), **options)
    torch.manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 3, 6, 6, requires_grad=True)
    output = model(x)
    (output * torch.randn_like(output)).mean().backward()
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Outcome(output.detach(), x.grad, gradients, model.state_dict())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("balance", "checkpoint", "chunks", "deferred"),
    [*product(BALANCES, MODES, (1, 2, 4), (False, True))],
)
def test_outputs_and_gradients_have_the_same_bits(
    balance: list[int], checkpoint: str, chunks: int, deferred: bool
) -> None:
    options = {"checkpoint": checkpoint, "chunks": chunks, "deferred_batch_norm": deferred}
    ours, theirs = (trained(library, balance, **options) for library in (OURS, THEIRS))
    assert torch.equal(ours.output, theirs.output)
    assert torch.equal(ours.input_gradient, theirs.input_gradient)
    assert_same(ours.gradients, theirs.gradients)
    assert ours.state.keys() == theirs.state.keys()


def gradients_in_order(samples: Iterable[int]) -> dict[str, Tensor]:
    """Return the gradients of a plain loop over micro-batches of two samples, in this order."""
    model = unet(OURS)
    torch.manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 3, 6, 6)
    weights = torch.randn_like(x)
    for first in samples:
        part = slice(first, first + 2)
        (model(x[part]) * weights[part] / x.numel()).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def test_gradients_are_added_from_the_last_micro_batch_to_the_first() -> None:
    found = trained(OURS, [6], checkpoint="never", chunks=4).gradients
    expected = gradients_in_order(reversed(range(0, NUM_SAMPLES, 2)))
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name.removeprefix("partitions.0.")]), name


@pytest.mark.parametrize("balance", BALANCES)
def test_running_statistics_by_micro_batch_have_the_same_bits(balance: list[int]) -> None:
    options = {"checkpoint": "never", "chunks": 4}
    assert_same(*(trained(library, balance, **options).state for library in (OURS, THEIRS)))


@pytest.mark.parametrize("checkpoint", MODES)
def test_recomputation_does_not_change_running_statistics(checkpoint: str) -> None:
    """In torchgpipe it does: they are updated by each recomputed micro-batch once more."""
    ours = trained(OURS, [2, 4], checkpoint=checkpoint, chunks=4).state
    assert_same(ours, trained(THEIRS, [2, 4], checkpoint="never", chunks=4).state)
    theirs = trained(THEIRS, [2, 4], checkpoint=checkpoint, chunks=4).state
    count = "partitions.0.1.num_batches_tracked"
    assert int(ours[count]) == 4
    assert int(theirs[count]) == {"never": 4, "except_last": 7, "always": 8}[checkpoint]


@pytest.mark.parametrize(("balance", "checkpoint"), [*product(BALANCES, MODES)])
def test_deferred_statistics_differ_in_the_bias_of_the_variance(
    balance: list[int], checkpoint: str
) -> None:
    options = {"checkpoint": checkpoint, "chunks": 4, "deferred_batch_norm": True}
    ours, theirs = (trained(library, balance, **options).state for library in (OURS, THEIRS))
    num_values = NUM_SAMPLES * 6 * 6
    for name, tensor in theirs.items():
        if name.endswith("running_var"):  # 0.9 of it are the ones that it began with
            unbiased = 0.9 + (tensor - 0.9) * num_values / (num_values - 1)
            torch.testing.assert_close(ours[name], unbiased)
            assert not torch.allclose(ours[name], tensor, atol=1e-6)
        else:
            torch.testing.assert_close(ours[name], tensor)


def test_evaluation_has_the_same_bits() -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": 3}
    outputs = []
    for library in (OURS, THEIRS):
        model = library.GPipe(unet(library), [1, 3, 2], **options).eval()
        torch.manual_seed(1)
        x = torch.randn(NUM_SAMPLES, 3, 6, 6, requires_grad=True)
        with torch.no_grad():
            outputs.append(model(x))
        model(x).sum().backward()
        outputs.append(x.grad)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_checkpoints_of_torchgpipe_load() -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "deferred_batch_norm": True}
    old = THEIRS.GPipe(unet(THEIRS, seed=0), [2, 4], **options)
    new = OURS.GPipe(unet(OURS, seed=1), [2, 4], **options)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert_same(new.state_dict(), old.state_dict())
    old.load_state_dict(new.state_dict())


@pytest.mark.parametrize(
    "module", ["torchgpipe", "torchgpipe.skip", "torchgpipe.balance", "torchgpipe.batchnorm"]
)
def test_public_names_are_the_same(module: str) -> None:
    theirs = pytest.importorskip(module)
    ours = pytest.importorskip(f"stageline.{module}")
    assert sorted(ours.__all__) == sorted(theirs.__all__)

"""Code in a forward, outside of its layers, that is repeated exactly as it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.model.recording.parity import MODES, WIDTH, Block, Mode, Model, assert_parity, batch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass
class Result:
    x: Tensor
    extra: list[Tensor]


class Pair(NamedTuple):
    x: Tensor
    nothing: None


class ReturnsDataclass(Block):
    def forward(self, x: Tensor) -> Result:
        return Result(super().forward(x), [x.mean()])


class ReturnsNested(Block):
    def forward(self, *, x: Tensor, scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        return {"pair": Pair(super().forward(x) * scale, None), "items": [x, (x, 2)]}


class ReturnsViews(Block):
    """Two views that overlap, of which the caller changes one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y[..., :4], y[..., 2:6]


class ReturnsArgument(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.clone()), x.flatten(0, 1)


class SetsAttribute(Block):
    """The auxiliary loss of a router, say, which the model collects."""

    penalty: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Any:
        self.penalty = x.pow(2).mean()
        return super().forward(x)


class DrawsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1).bernoulli_(0.7)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x * ctx.factor, None


def dataclasses_(_: Model, x: Tensor, block: Any) -> Any:
    found = block(x)
    return found.x * found.extra[0]


def nested(_: Model, x: Tensor, block: Any) -> Any:
    return block(x=x, scale=0.5)["pair"].x + block(x=x)["items"][1][0]


def add_in_place(_: Model, x: Tensor, block: Any) -> Any:
    y: Tensor = block(x)
    y += x
    y[:, 0] = x[:, 1]
    return y.relu_()


def view_in_place(_: Model, x: Tensor, block: Any) -> Any:
    y: Tensor = block(x)
    view = y[:, :2]
    z = block(y * 1.0)
    view.mul_(2.0)
    return y + z


def overlapping_views(_: Model, x: Tensor, block: Any) -> Any:
    first, second = block(x)
    second.add_(1.0)
    return torch.cat([first.clone(), second], -1)


def returned_argument(_: Model, x: Tensor, block: Any) -> Any:
    x = x + 1.0
    y, view = block(x)
    view *= 2.0  # changes x
    return y + x


def collected_attribute(_: Model, x: Tensor, block: Any) -> Any:
    y: Tensor = block(x)
    return y + block.penalty


def without_gradient(_: Model, x: Tensor, block: Any) -> Any:
    with torch.no_grad():
        gate = block(x).sigmoid()
    with torch.inference_mode():
        mean = x.mean(-1, keepdim=True)
        mean[:, 0] = 0.0
    result: Tensor = block(x) * gate + mean.clone()
    return result


def autocast(_: Model, x: Tensor, block: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x) @ torch.eye(WIDTH)
    return y.float()


def own_backward(_: Model, x: Tensor, block: Any) -> Any:
    return torch.tanh(Square.apply(block(x), 0.5))  # type: ignore[no-untyped-call]


def gradient_inside(_: Model, x: Tensor, block: Any) -> Any:
    return x + torch.autograd.grad(block(x).sum(), x, create_graph=True)[0]


def gradient_hook(_: Model, x: Tensor, block: Any) -> Any:
    y: Tensor = block(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return y


def random_numbers(_: Model, x: Tensor, block: Any) -> Any:
    y = functional.dropout(block(x), 0.2)
    y = y * torch.empty(y.shape[:2]).bernoulli_(0.8)[..., None] + torch.rand_like(y)
    return y[:, torch.randperm(y.shape[1])]


def vmapped(model: Model, x: Tensor, block: Any) -> Any:
    weight = model.head.weight
    found: Tensor = torch.vmap(lambda row: row.softmax(-1) @ weight.t(), 1, 1)(block(x))
    return x + found.sum(-1, keepdim=True)


def transformed(_: Model, x: Tensor, block: Any) -> Any:
    found: Tensor = torch.func.grad(lambda y: (y.sin() * y).sum())(block(x))
    return x + found


def constants_of_numpy(_: Model, x: Tensor, block: Any) -> Any:
    table = np.arange(x.shape[1] * WIDTH).reshape(x.shape[1], WIDTH) / 100.0
    made = torch.as_tensor(table), torch.from_numpy(table), torch.tensor(table)
    result: Tensor = block(x) + sum(each.float() for each in made)
    return result


def complex_numbers(_: Model, x: Tensor, block: Any) -> Any:
    z = torch.fft.fft(block(x), dim=1)
    return torch.view_as_real(z * torch.exp(1j * z.abs())).sum(-1)


def all_finite(_: Model, x: Tensor, block: Any) -> Any:
    y: Tensor = block(x)
    torch._assert(y.isfinite().all(), "not finite")  # type: ignore[no-untyped-call]
    assert y.isfinite().all()
    return y


def needs_no_zeros(_: Model, x: Tensor, block: Any) -> Any:
    y = block(x)
    factor = torch.linalg.cholesky(y.transpose(1, 2) @ y + torch.eye(WIDTH) * y.std())
    return x + y @ factor * 0.1


def made_of(apply: Any, block: Any = Block) -> type[Model]:
    return type(apply.__name__, (Model,), {"apply_block": apply, "block": lambda _: block()})


CASES = {
    "dataclass": made_of(dataclasses_, ReturnsDataclass),
    "nested containers, keywords": made_of(nested, ReturnsNested),
    "in place": made_of(add_in_place),
    "in place on a view": made_of(view_in_place),
    "in place on overlapping results": made_of(overlapping_views, ReturnsViews),
    "in place on a returned argument": made_of(returned_argument, ReturnsArgument),
    "attribute of a layer": made_of(collected_attribute, SetsAttribute),
    "no_grad and inference_mode": made_of(without_gradient),
    "autocast": made_of(autocast),
    "autograd.Function": made_of(own_backward),
    "autograd.grad": made_of(gradient_inside),
    "hook of a tensor": made_of(gradient_hook),
    "random numbers": made_of(random_numbers),
    "vmap": made_of(vmapped),
    "func.grad": made_of(transformed),
    "numpy": made_of(constants_of_numpy),
    "complex": made_of(complex_numbers),
    "assertions": made_of(all_finite),
    "cholesky": made_of(needs_no_zeros),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.backend)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_in_a_plain_loop(name: str, mode: Mode) -> None:
    assert len(assert_parity(CASES[name], mode)) >= 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_in_a_checkpoint_are_layers(reentrant: bool) -> None:
    def apply(_: Model, x: Tensor, block: Any) -> Any:
        return checkpoint(lambda y: block(y) * 2, x, use_reentrant=reentrant)

    assert len(assert_parity(made_of(apply, lambda: Block(dropout=0.0)))) == 5


class OwnDropPath(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = DrawsInPlace()

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = self.drop(block(x)) + x
        return result


class Parametrized(Model):
    """A spectral norm is changed by each forward; its weight is used here and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.embed)
        for block in self.blocks:
            parametrizations.spectral_norm(block.linear)  # type: ignore[arg-type]


class Shared(Model):
    """Modules with two names, inside of a layer and outside, and a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.again = self.blocks[1]
        self.blocks[1].twin = self.blocks[1].linear
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.blocks[1].linear.weight  # type: ignore[assignment,union-attr]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.head(self.tied(self.again(self.embed(x))))


class SharedPart(Model):
    """Blocks that have a part in common, as an encoding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].norm = self.blocks[0].norm


class Compiled(Model):
    def block(self) -> Any:
        return torch.compile(Block(), backend="eager")


def double_gradient(_: nn.Module, gradients: Any, __: Any) -> Any:
    return (gradients[0] * 2,)


class Hooked(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda *given: given[-1] * 2)
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        self.blocks[2].register_forward_hook(lambda *given: given[-1] + 1, with_kwargs=True)
        self.blocks[2].register_full_backward_hook(double_gradient)
        self.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        self.register_forward_hook(lambda *given: given[-1] * 0.5)


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False).eval()
        self.head.requires_grad_(False)


class CallsForward(Model):
    """Modules whose forward is called by its name are as good as others."""

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = block.forward(x)
        return result


class Averaged(Model):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        y: Tensor = block(x)
        if block is self.blocks[2]:
            self.average.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
            y = y - self.average
        return y


@pytest.mark.filterwarnings("ignore:.*global hooks:UserWarning")  # torch's counter of FLOPs
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.backend)
@pytest.mark.parametrize(
    "model",
    [
        *(OwnDropPath, Parametrized, Shared, SharedPart, Compiled, Hooked, Frozen, CallsForward),
        Averaged,
    ],
)
def test_a_model_trains_as_in_a_plain_loop(model: type[Model], mode: Mode) -> None:
    assert len(assert_parity(model, mode)) >= 5


class ChangesBatch(Model):
    """In place, before any layer has run and after."""

    def forward(self, x: Tensor) -> Any:
        x.mul_(0.5)
        y = x * 1.0
        hidden = self.embed(x.clone())
        y[..., 0] += hidden[..., 0].detach()
        x[..., 1] = hidden[..., 1].detach()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + y.mean() + x.sum()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.backend)
def test_a_batch_that_the_forward_changes_is_left_as_it_was(mode: Mode) -> None:
    given = batch()
    before = given[0].clone()
    assert_parity(ChangesBatch, mode, [given, batch(6)])
    assert torch.equal(given[0], before)


class OtherOutput(Model):
    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"found": found, "again": found, "given": x, "length": x.shape[1], "none": None}


def test_an_output_may_have_numbers_inputs_and_a_tensor_twice() -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        found = functional.mse_loss(output["found"], target) * output["length"]
        extra: Tensor = output["again"].mean() * output["given"].mean()
        total: Tensor = found + extra
        return total

    assert_parity(OtherOutput, loss_fn=loss)

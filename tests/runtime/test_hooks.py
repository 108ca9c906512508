"""Hooks, attributes and classes of parameters work as in a plain loop, where aliases are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.nn.utils import parametrize

from stageline.errors import ParityError, StagelineError
from stageline.pipeline import Pipeline
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.zoo.cases import grouped

WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "backend": "serial"},
    {"schedule": "zb_h1", "backend": "threads"},
    {"schedule": "zbv", "backend": "threads", "recompute": "always"},
]
Register = Callable[[nn.Parameter, list[Tensor]], object]


class Head(nn.Module):
    """Logits of tokens, by the weight of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied() -> nn.Sequential:
    torch.manual_seed(6)
    embedding = nn.Embedding(7, 4)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(embedding, *blocks, Head(embedding.get_parameter("weight")))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randint(0, 7, (8,)), torch.randint(0, 7, (8,))


def train_plainly(model: nn.Module, num_steps: int) -> None:
    """Without zero_grad between steps."""
    for _ in range(num_steps):
        for x, y in zip(*(part.chunk(4) for part in batch()), strict=True):
            loss = F.cross_entropy(model(x), y)
            loss.backward(torch.full_like(loss, 0.25))  # type: ignore[no-untyped-call]


def weight_of(model: nn.Module, name: str = "0.weight") -> nn.Parameter:
    return model.get_parameter(name)


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way.values()))
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pipeline]]:
    pipes: list[Pipeline] = []

    def make(model: nn.Module, **options: Any) -> Pipeline:
        usual: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4}
        pipes.append(Pipeline(model, F.cross_entropy, **grouped(usual | request.param | options)))
        return pipes[-1]

    yield make
    for pipe in pipes:
        pipe.close()


def note(seen: list[Tensor], gradient: Tensor) -> None:
    seen.append(gradient.clone())


def scale(seen: list[Tensor], gradient: Tensor) -> Tensor:
    note(seen, gradient)
    return gradient * 2


def clamp(seen: list[Tensor], gradient: Tensor) -> Tensor:
    """A hook that is not linear, so that it matters which sum it sees."""
    note(seen, gradient)
    return gradient.clamp(-0.01, 0.01)


def after(seen: list[Tensor], weight: nn.Parameter, *, forgets: bool = False) -> None:
    assert weight.grad is not None
    note(seen, weight.grad)
    weight.grad.clamp_(-0.02, 0.02)
    if forgets:
        weight.grad = None


def on_gradient(hook: Callable[[list[Tensor], Tensor], Tensor | None]) -> Register:
    return lambda weight, seen: weight.register_hook(partial(hook, seen))  # type: ignore[no-untyped-call]


def on_weight(hook: Callable[[list[Tensor], nn.Parameter], None]) -> Register:
    return lambda weight, seen: weight.register_post_accumulate_grad_hook(partial(hook, seen))  # type: ignore[no-untyped-call]


HOOKS: dict[str, Register] = {
    "looks": on_gradient(note),
    "scales": on_gradient(scale),
    "clamps": on_gradient(clamp),
    "after": on_weight(after),
    "forgets": on_weight(partial(after, forgets=True)),
}


@pytest.mark.parametrize("name", ["0.weight", "2.0.weight"])
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_see_each_micro_batch_once_as_in_a_plain_loop(
    register: Register, name: str, opened: Callable[..., Pipeline]
) -> None:
    """Hooks of a tied weight see the sum of its uses."""
    expected, wanted = tied(), list[Tensor]()
    register(weight_of(expected, name), wanted)
    train_plainly(expected, 3)
    model, seen = tied(), list[Tensor]()
    pipe = opened(model)
    pipe.step(*batch())  # hooks may come later
    model.zero_grad()
    register(weight_of(model, name), seen)
    for _ in range(3):
        pipe.step(*batch())
    assert len(seen) == len(wanted) == 12
    assert all(map(torch.equal, seen, wanted))
    found, want = weight_of(model, name).grad, weight_of(expected, name).grad
    assert (found is None) == (want is None)
    assert found is None or want is None or torch.equal(found, want)
    pipe.verify(*batch())


def test_verify_detects_hooks_that_are_not_called(
    opened: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also hooks that are called with the sum of all micro-batches."""
    monkeypatch.setattr(TiedWeights, "store_hooked_gradients", lambda *_: None)
    for hook in (lambda gradient: gradient * 2, torch.sign):
        model = tied()
        weight_of(model).register_hook(hook)  # type: ignore[no-untyped-call]
        with pytest.raises(ParityError, match=r"0\.weight"):
            opened(model).verify(*batch())


def test_without_hooks_uses_are_added_in_the_order_of_layers(
    opened: Callable[..., Pipeline],
) -> None:
    """Each use is summed over all micro-batches first."""
    model = tied()
    pipe = opened(model)
    pipe.step(*batch())
    once = weight_of(model).grad
    removed = tied()
    weight_of(removed).register_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
    opened(removed).step(*batch())
    other = weight_of(removed).grad
    assert once is not None
    assert other is not None
    assert torch.equal(once, other)


def test_an_optimizer_in_the_backward_is_refused_unless_there_is_one_micro_batch(
    opened: Callable[..., Pipeline],
) -> None:
    """A plain loop uses the new weights for the next micro-batch; here it is already in flight."""
    for name in ("0.weight", "2.0.bias"):
        for num_microbatches in (4, 1):
            model = tied()
            weight = weight_of(model, name)

            def step(weight: nn.Parameter) -> None:
                optimizer = torch.optim.SGD([weight], lr=0.1)
                optimizer.step()
                optimizer.zero_grad()

            weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
            schedule = {} if num_microbatches > 1 else {"schedule": "gpipe"}
            pipe = opened(model, num_microbatches=num_microbatches, **schedule)
            if num_microbatches > 1:
                with pytest.raises(
                    StagelineError, match="changed a weight in the middle of a step"
                ):
                    pipe.step(*batch())
            else:
                before = weight.detach().clone()
                pipe.verify(*batch())
                assert torch.equal(weight, before)
                pipe.step(*batch())
                assert not torch.equal(weight, before)


class Counted(nn.Parameter):
    """A subclass of Parameter that sees torch's functions and counts them."""

    num_calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num_calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class ScaledEmbedding(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        self.weight.num_uses += 1
        result: Tensor = F.embedding(x, self.weight) * self.weight.scale
        return result


def with_attributes(kind: type[nn.Parameter]) -> nn.Sequential:
    torch.manual_seed(6)
    weight: Any = kind(torch.randn(7, 4))
    weight.scale, weight.num_uses = 0.5, 0
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(ScaledEmbedding(weight), *blocks, Head(weight))


class Squash(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


def parametrized() -> nn.Sequential:
    model = tied()
    embedding, head = model[0], Head(nn.Parameter(torch.zeros(7, 4)))
    for module in (embedding, head):
        parametrize.register_parametrization(module, "weight", Squash())
    original = "parametrizations.weight.original"
    head.get_submodule("parametrizations.weight").original = embedding.get_parameter(original)
    return nn.Sequential(*list(model)[:-1], head)


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "attributes": partial(with_attributes, nn.Parameter),
    "class": partial(with_attributes, Counted),
    "parametrized": parametrized,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_tied_weight_keeps_its_class_attributes_and_parametrization(
    make: Callable[[], nn.Sequential], opened: Callable[..., Pipeline]
) -> None:
    expected, model = make(), make()
    first, found = next(expected.parameters()), next(model.parameters())
    for weight in (first, found):
        weight.register_hook(lambda _: None)  # type: ignore[no-untyped-call]  # a plain loop's order
    train_plainly(expected, 1)
    Counted.num_calls = 0
    pipe = opened(model)
    pipe.step(*batch())
    assert (Counted.num_calls > 0) == isinstance(found, Counted)
    assert found.grad is not None
    assert first.grad is not None
    assert torch.equal(found.grad, first.grad)
    times = 2 if "always" in pipe._session.assembly.settings.recompute else 1
    assert getattr(found, "num_uses", 0) == times * getattr(first, "num_uses", 0)
    pipe.verify(*batch())


def test_a_tied_weight_may_be_frozen_between_steps(opened: Callable[..., Pipeline]) -> None:
    model = tied()
    weight, seen = weight_of(model), list[Tensor]()
    weight.register_hook(partial(note, seen))  # type: ignore[no-untyped-call]
    pipe = opened(model)
    counts = []
    for is_trained in (True, False, True):
        weight.requires_grad_(is_trained)
        pipe.step(*batch())
        counts.append(len(seen))
    assert counts == [4, 4, 8]


def test_backward_hooks_of_layers_see_what_they_see_in_a_plain_loop(
    opened: Callable[..., Pipeline],
) -> None:
    """On both sides of a stage border, and inside a layer."""

    def watch(model: nn.Module) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for name in ("1.0", "2", "3", "4"):
            seen = found.setdefault(name, [])

            def look(_: nn.Module, inside: Any, outside: Any, seen: Any = seen) -> None:
                seen.extend(tensor.clone() for tensor in (*inside, *outside))

            model.get_submodule(name).register_full_backward_hook(look)
        return found

    expected, model = tied(), tied()
    wanted, found = watch(expected), watch(model)
    train_plainly(expected, 1)
    opened(model).step(*batch())
    for name, tensors in wanted.items():
        assert len(found[name]) == len(tensors)
        assert all(map(torch.equal, found[name], tensors)), name


def chain() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7))


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_hooks_are_called_in_a_stream_of_several_versions(backend: str) -> None:
    """They are called with the user's own parameter, whose gradient is that so far."""
    model, seen, after_each = chain(), list[Tensor](), list[bool]()
    weight = weight_of(model, "1.weight")
    weight.register_hook(partial(note, seen))  # type: ignore[no-untyped-call]

    def look(found: nn.Parameter) -> None:
        after_each.append(found is weight and found.grad is not None)

    weight.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "schedule": "pipedream"}
    pipe = Pipeline(
        model,
        F.cross_entropy,
        backend=backend,
        optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1),
        **grouped(options),
    )
    for number, _ in enumerate(pipe.run([batch()] * 6)):
        if number == 0:  # it is not the last to be registered
            model.get_parameter("0.weight").register_hook(partial(note, seen))  # type: ignore[no-untyped-call]
    assert after_each == [True] * 12
    assert len(seen) > 12
    pipe.close()


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_hook_that_changes_weights_in_a_stream_is_refused(schedule: str) -> None:
    model = chain()

    def change(weight: Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    weight_of(model, "1.bias").register_post_accumulate_grad_hook(change)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "schedule": schedule}
    pipe = Pipeline(
        model,
        F.cross_entropy,
        backend="serial",
        optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1),
        **grouped(options),
    )
    with pytest.raises(StagelineError, match="changed a weight in the middle of a step"):
        list(pipe.run([batch()] * 3))
    pipe.close()


def test_weights_tied_within_a_stage_share_their_hooks_in_a_stream() -> None:
    """Hooks see the sum of all uses."""
    model = tied()
    seen: list[Tensor] = []
    weight_of(model).register_hook(partial(note, seen))  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"num_ranks": 1, "num_microbatches": 2, "schedule": "pipedream"}
    pipe = Pipeline(
        model,
        F.cross_entropy,
        backend="serial",
        optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.0),
        **grouped(options),
    )
    list(pipe.run([batch()]))
    expected, wanted = tied(), list[Tensor]()
    weight_of(expected).register_hook(partial(note, wanted))  # type: ignore[no-untyped-call]
    for x, y in zip(*(part.chunk(2) for part in batch()), strict=True):
        loss = F.cross_entropy(expected(x), y)
        loss.backward(torch.full_like(loss, 0.5))  # type: ignore[no-untyped-call]
    assert len(seen) == len(wanted) == 2
    assert all(map(torch.equal, seen, wanted))
    pipe.close()

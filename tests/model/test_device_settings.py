"""Random generators and autocast of accelerators: of any kind, by fakes of torch's modules."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.model.device_settings import (
    default_generators,
    device_types,
    generators_in_use,
    preserved_generators,
    seed_generators,
    with_index,
)
from stageline.pipeline import Pipeline
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.randomness.seeded_draws import (
    RandomKey,
    SeededDraws,
    generators_of,
    layer_seed,
)

KEY = RandomKey(3, 0, 1, "dropout")
XPU = torch.device("xpu", 1)


class FakeModule:
    """The module of a kind of device, as `torch.xpu`: generators exist after `init`."""

    def __init__(self, *, is_used: bool = True) -> None:
        self.default_generators: tuple[torch.Generator, ...] = ()
        if is_used:
            self.init()

    def init(self) -> None:
        self.default_generators = tuple(torch.Generator().manual_seed(7) for _ in range(2))


class FakeOnly:
    """The module of a kind of device of which there is one, as `torch.mps`."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.manual_seed = self.generator.manual_seed
        self.get_rng_state = self.generator.get_state
        self.set_rng_state = self.generator.set_state

    def is_available(self) -> bool:
        return True


def use(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let torch have an accelerator of which the second device is current."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    fake = FakeModule()
    use(monkeypatch, fake)
    return fake


class DrawsOnDevice(nn.Module):
    """A layer that draws as an operator on the second device does, from when it is told to."""

    def __init__(self, module: FakeModule, *, draws: bool = True) -> None:
        super().__init__()
        self.generator = module.default_generators[1]
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=self.generator) if self.draws else x.clone()


def test_a_layer_draws_by_its_key_on_its_device_and_leaves_the_generators(
    module: FakeModule,
) -> None:
    layer = DrawsOnDevice(module)
    before = [generator.get_state() for generator in module.default_generators]
    with SeededDraws([layer], XPU).of_layer(layer, KEY):
        found = layer(torch.zeros(4))
    expected = torch.rand(4, generator=torch.Generator().manual_seed(layer_seed(*KEY)))
    assert torch.equal(found, expected)
    after = [generator.get_state() for generator in module.default_generators]
    assert all(map(torch.equal, after, before))


def test_draws_on_a_device_are_counted(module: FakeModule) -> None:
    layer = DrawsOnDevice(module)
    draws = SeededDraws([layer], XPU)
    draws.counts = True
    for layer.draws in (True, False):
        with draws.of_layer(layer, KEY):
            layer(torch.zeros(4))
    assert draws.num_draws == 1


def test_layers_that_stay_where_they_are_draw_from_the_device_of_their_weights(
    module: FakeModule,
) -> None:
    layer: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=XPU)])
    assert generators_of([layer], None) == [torch.default_generator, module.default_generators[1]]
    assert generators_of([nn.Linear(1, 1)], None) == [torch.default_generator]


def test_a_device_without_a_number_is_the_current_one(module: FakeModule) -> None:
    assert with_index(torch.device("xpu")) == XPU
    assert default_generators(torch.device("xpu"))[1] is module.default_generators[1]


def test_the_first_use_of_a_device_makes_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule(is_used=False)
    use(monkeypatch, fake)
    assert generators_in_use() == [torch.default_generator]  # to look does not begin to use it
    assert default_generators(XPU)[1] is fake.default_generators[1]


def test_what_is_drawn_or_seeded_on_all_devices_can_be_taken_back(module: FakeModule) -> None:
    everywhere = torch.default_generator, *module.default_generators
    before = [generator.get_state() for generator in everywhere]
    with preserved_generators():
        seed_generators(5)
        assert {generator.initial_seed() for generator in everywhere} == {5}
        torch.rand(1, generator=module.default_generators[0])
    assert all(map(torch.equal, [generator.get_state() for generator in everywhere], before))


def test_a_device_whose_module_only_has_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeOnly()
    use(monkeypatch, fake)
    before = fake.get_rng_state()
    with preserved_generators():
        seed_generators(5)
        assert fake.generator.initial_seed() == 5
    assert torch.equal(fake.get_rng_state(), before)
    assert len(default_generators(torch.device("xpu", 0))) == 2


def test_initializing_on_the_meta_device_leaves_the_generators_of_devices(
    module: FakeModule,
) -> None:
    before = module.default_generators[0].get_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with Pipeline(model, nn.functional.mse_loss, num_ranks=1, num_microbatches=1, backend="serial"):
        assert torch.equal(module.default_generators[0].get_state(), before)


def test_threads_notice_a_layer_that_begins_to_draw_on_a_device(module: FakeModule) -> None:
    late = DrawsOnDevice(module, draws=False)
    model = nn.Sequential(nn.Linear(4, 4), late)
    x = torch.zeros(2, 4)
    with Pipeline(
        model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2, backend="threads"
    ) as pipe:
        pipe.step(x, x)
        late.draws = True
        with pytest.warns(UserWarning, match="a layer that drew none before"):
            pipe.step(x, x)


@pytest.mark.usefixtures("module")
def test_autocast_of_the_accelerator_comes_with_a_forward() -> None:
    assert device_types() == ("cpu", "xpu")
    with torch.autocast("xpu", torch.bfloat16):
        context = ForwardContext.current()
    assert context.autocast == (("xpu", torch.bfloat16),)
    seen = []

    def run() -> None:

        with ExitStack() as stack:
            context.enter(stack, grad=True)
            seen.append(torch.is_autocast_enabled("xpu"))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


def test_without_an_accelerator_only_the_cpu_has_settings() -> None:
    assert device_types() == ("cpu",)
    assert default_generators(torch.device("cpu")) == generators_in_use()

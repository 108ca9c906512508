"""Options of a pipeline that change how it computes, and their effect on the result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import BatchError, ModelError, StageError
from stageline.model.layers import Layer, LayerSequence
from stageline.model.split import cut, layer_costs
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.runtime.stage.offload import OffloadedTensors
from stageline.schedules.build import schedule_names
from stageline.zoo.cases import grouped

SPLIT = ["zb_h1", "zbv"]  # schedules with I and W


def chain(width: int = 6) -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(width, 3))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def trained(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> list[Tensor]:
    """Gradients after two steps without `zero_grad`."""
    pipe = Pipeline(model, mse_loss, num_microbatches=4, **grouped(options))
    pipe.step(*batch)
    pipe.step(*batch)
    pipe.close()
    return gradients(model)


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("schedule", schedule_names(synchronous=True))
def test_fused_accumulation_has_the_same_bits_for_any_schedule(schedule: str) -> None:
    batch = torch.randn(2048, 6), torch.randn(2048, 3)
    wanted = trained(chain(), batch, num_ranks=1, schedule="gpipe", accumulate="fused")
    found = trained(chain(), batch, num_ranks=2, schedule=schedule, accumulate="fused")
    assert_equal(found, wanted)
    exact = trained(chain(), batch, num_ranks=1, schedule="gpipe")
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, exact, strict=True))


def test_fused_accumulation_is_held_to_a_plain_loop_that_fuses() -> None:
    pipe = Pipeline(
        chain(), mse_loss, num_ranks=2, num_microbatches=4, options=Options(accumulate="fused")
    )
    pipe.verify(torch.randn(64, 6), torch.randn(64, 3))
    pipe.close()


class Half(nn.Module):
    """Calls F.linear with the bias by name, in three dimensions, and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x[:, None], self.a.weight, bias=self.a.bias)
        return nn.functional.linear(y.tanh(), self.b.weight)[:, 0]


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_fused_accumulation_loses_no_weight(schedule: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Half(), nn.Linear(6, 6), Half(), nn.Linear(6, 3))

    batch = torch.randn(8, 6), torch.randn(8, 3)
    wanted = trained(make(), batch, num_ranks=2, schedule=schedule)
    found = trained(make(), batch, num_ranks=2, schedule=schedule, accumulate="fused")
    assert len(found) == len(wanted)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(torch.tanh(self.linear(x)))
        return out


def blocks(change: Callable[[nn.Module], Any]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(change(Block()) for _ in range(4)))


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
@pytest.mark.parametrize(
    "change",
    [lambda module: torch.compile(module, backend="aot_eager"), compiled_in_place],
    ids=["torch.compile(module)", "module.compile()"],
)
def test_compiled_layers_train_to_the_same_bits(
    change: Callable[[nn.Module], Any], schedule: str
) -> None:
    batch = torch.randn(8, 6), torch.randn(8, 6)
    wanted = trained(blocks(lambda module: module), batch, num_ranks=2, schedule=schedule)
    assert_equal(trained(blocks(change), batch, num_ranks=2, schedule=schedule), wanted)


def test_a_compiled_stage_defers_nothing() -> None:
    model = blocks(lambda module: torch.compile(module, backend="eager"))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, schedule="zb_h1")
    assert all(stage.is_opaque for stage in pipe._session.assembly.stages)
    pipe.step(torch.randn(4, 6), torch.randn(4, 6))
    assert len(gradients(model)) == 8
    pipe.close()


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast_and_a_scaler_train_to_the_same_bits(
    schedule: str, recompute: str, backend: str
) -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    plain, model = chain(), chain()
    states = []
    for which in (plain, model):
        optimizer = torch.optim.SGD(which.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

        def scaled(output: Tensor, target: Tensor, scaler: Any = scaler) -> Tensor:
            loss: Tensor = scaler.scale(mse_loss(output, target))
            return loss

        pipe = None
        if which is model:
            options: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
            pipe = Pipeline(
                model, scaled, num_ranks=2, num_microbatches=4, backend=backend, **grouped(options)
            )
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                if pipe:
                    pipe.step(x, y)
                else:
                    for a, b in zip(torch.split(x, 2), torch.split(y, 2), strict=True):
                        loss = scaled(plain(a), b)
                        with torch.autocast("cpu", enabled=False):
                            loss.backward(torch.tensor(0.25))  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            (pipe.clip_grad_norm_ if pipe else _clip(which))(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        states.append(list(which.parameters()))
        if pipe:
            pipe.close()
    assert_equal(*states)


def _clip(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


def test_gradients_are_clipped_by_the_norm_of_all_ranks() -> None:
    batch = torch.randn(8, 6), torch.randn(8, 3)
    norms, found = [], []
    for num_ranks in (1, 2, 4):
        model = chain()
        pipe = Pipeline(model, mse_loss, num_ranks=num_ranks, num_microbatches=4)
        pipe.step(*batch)
        norms.append(pipe.clip_grad_norm_(1e-3))
        found.append(gradients(model))
        pipe.close()
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])
    total = torch.stack([gradient.norm() for gradient in found[0]]).norm()
    assert torch.allclose(total, torch.tensor(1e-3), rtol=1e-3)
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


class FakeMemory:
    """A host memory that records each copy, and when it is made."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_on_host = 0  # tensors that are on the host now
        self.is_needed = False  # a backward runs

    def copy_out(self, tensor: Tensor) -> Tensor:
        self.events.append("copy out")
        self.num_on_host += 1
        return tensor.clone()

    def copy_in(self, on_host: Tensor) -> Tensor:
        self.events.append("copy in too late" if self.is_needed else "copy in")
        self.num_on_host -= 1
        return on_host.clone()

    def wait(self, on_device: Tensor) -> Tensor:
        self.events.append("wait")
        return on_device


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *SPLIT])
def test_offloaded_activations_are_back_before_their_backward(
    schedule: str,
) -> None:
    batch = torch.randn(8, 6), torch.randn(8, 3)
    wanted = trained(chain(), batch, num_ranks=2, schedule=schedule)
    model, memory = chain(), FakeMemory()
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=4, schedule=schedule)
    first = pipe._session.assembly.stages[0]
    first.host_memory = memory
    whole = first.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        memory.is_needed = True
        back = whole(*args, **kwargs)
        memory.is_needed = False
        return back

    first.backward = backward  # type: ignore[method-assign]
    pipe.step(*batch)
    pipe.step(*batch)
    assert_equal(gradients(model), wanted)
    assert memory.num_on_host == 0
    assert memory.events.count("copy out") == memory.events.count("copy in") > 0
    assert "copy in too late" not in memory.events
    pipe.close()


def test_what_the_backward_needs_first_is_fetched_first() -> None:
    class Memory:
        order: ClassVar[list[float]] = []

        def copy_out(self, tensor: Tensor) -> Tensor:
            return tensor

        def copy_in(self, on_host: Tensor) -> Tensor:
            self.order.append(float(on_host))
            return on_host

        def wait(self, on_device: Tensor) -> Tensor:
            return on_device

    saved = OffloadedTensors(Memory())
    numbers = [saved.pack(torch.tensor(float(value))) for value in range(3)]
    saved.fetch()
    assert Memory.order == [2.0, 1.0, 0.0]  # the backward runs from the last to the first
    assert [float(saved.unpack(number)) for number in numbers] == [0.0, 1.0, 2.0]


def test_weights_and_views_of_weights_stay_on_the_device() -> None:
    memory = FakeMemory()
    saved, weight = OffloadedTensors(memory), nn.Parameter(torch.ones(2, 3))
    for kept in (weight, weight.t(), weight[0]):
        assert saved.pack(kept) is kept
    assert memory.events == []
    assert saved.pack(2 * weight) == 0
    assert memory.events == ["copy out"]


def test_activations_that_are_needed_next_are_not_offloaded() -> None:
    memory = FakeMemory()
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=4, schedule="1f1b")
    pipe._session.assembly.stages[-1].host_memory = memory  # its backward follows each forward
    pipe.step(torch.randn(8, 6), torch.randn(8, 3))
    assert memory.events == []
    pipe.close()


def test_offload_and_devices_on_a_cpu_change_nothing() -> None:
    batch = torch.randn(8, 6), torch.randn(8, 3)
    wanted = trained(chain(), batch, num_ranks=2)
    found = trained(chain(), batch, num_ranks=2, offload=True, devices=["cpu", "cpu"])
    assert_equal(found, wanted)


def test_each_rank_needs_a_device() -> None:
    with pytest.raises(ModelError, match="devices has 1 entries, but there are 2 ranks"):
        Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2, devices=["cpu"])


def test_layers_are_balanced_by_their_compute() -> None:
    wide = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),  # few weights, much work
        nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4096),  # many weights, little work
        nn.Linear(4096, 4),
    )
    layers = LayerSequence.of(wide)
    by_parameters = cut(layers, 2)
    costs = layer_costs(layers, {"x": torch.zeros(2, 3, 64, 64)})
    by_flops = cut(layers, 2, costs=costs)
    assert len(by_parameters[0]) == 5
    assert len(by_flops[0]) == 1
    before = copy.deepcopy(wide.state_dict())
    pipe = Pipeline(
        wide, mse_loss, num_ranks=2, num_microbatches=2, example_inputs=torch.zeros(2, 3, 64, 64)
    )
    assert pipe._session.assembly.layout.stages == by_flops
    assert all(torch.equal(before[name], tensor) for name, tensor in wide.state_dict().items())
    pipe.close()


class ByData(nn.Module):
    """Has a shape that depends on data, which the meta device does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x if int((x > 0).sum()) > 3 else 2 * x


def test_a_layer_that_needs_data_is_balanced_by_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ByData(), nn.Linear(4, 4))
    layers = LayerSequence.of(model)
    costs = layer_costs(layers, {"x": torch.zeros(2, 4)})
    assert cut(layers, 2, costs=costs) == cut(layers, 2)


class Switching(nn.Module):
    """Works in place from the moment that the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_place = False

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.is_in_place else x * 2


def test_a_layer_that_starts_to_work_in_place_is_an_error_and_then_gets_copies() -> None:
    switching = Switching()
    late = Layer("late", switching, reads=("tokens",))
    model: list[Layer | nn.Module] = [nn.Linear(4, 4), late, nn.Linear(4, 3)]
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=2)
    x, tokens, y = torch.randn(4, 4), torch.ones(4, 4), torch.randn(4, 3)
    pipe.step(x, y, tokens=tokens)
    switching.is_in_place = True
    with pytest.raises(StageError, match="layer 'late' changed its input in place"):
        pipe.step(x, y, tokens=tokens)
    tokens = torch.ones(4, 4)
    pipe.step(x, y, tokens=tokens)
    assert torch.equal(tokens, torch.ones(4, 4))
    pipe.close()


def test_a_closed_pipeline_says_so() -> None:
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2)
    pipe.close()
    with pytest.raises(ModelError, match="the pipeline is closed"):
        pipe.step(torch.randn(4, 6), torch.randn(4, 3))


class Noisy(nn.Module):
    """Draws random numbers from a certain step on, without a random module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.chance = nn.Linear(6, 6), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return nn.functional.dropout(y, self.chance) if self.chance else y


def test_a_layer_that_starts_to_draw_is_noticed_in_threads_and_observed_afterwards() -> None:
    noisy = Noisy()
    model = nn.Sequential(noisy, nn.Tanh(), nn.Linear(6, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=4, backend="threads")
    batch = torch.randn(8, 6), torch.randn(8, 3)
    pipe.step(*batch)
    noisy.chance = 0.5
    with pytest.warns(UserWarning, match="drawn from torch's own generator during a step"):
        pipe.step(*batch)
    pipe.verify(*batch)  # and without a word
    pipe.step(*batch)
    pipe.close()


def test_a_layer_that_starts_to_draw_is_reproducible_at_once_if_one_rank_runs_at_a_time() -> None:
    noisy = Noisy()
    model = nn.Sequential(noisy, nn.Tanh(), nn.Linear(6, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=4, backend="serial")
    batch = torch.randn(8, 6), torch.randn(8, 3)
    pipe.step(*batch)
    noisy.chance = 0.5
    before = torch.get_rng_state()
    pipe.verify(*batch)
    assert torch.equal(torch.get_rng_state(), before)
    pipe.close()


class Uniform(nn.Module):
    """Adds noise from an operator that is called below torch's functions."""

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = torch.ops.aten.rand(list(x.shape))
        return x + noise


class Sampled(nn.Module):
    """Draws in several functions, also one that takes no generator."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.3) + torch.randn_like(x) + 0.1 * torch.rand(x.shape)
        heads = x.view(1, 1, *x.shape)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
        return attended.view(x.shape) + torch.full_like(x.detach(), 0.5).bernoulli_()


class Dropped(nn.Module):
    """Drops in every way that `dropout` can be called, beside attention with and without one."""

    def forward(self, x: Tensor) -> Tensor:
        drop, attend = nn.functional.dropout, nn.functional.scaled_dot_product_attention
        x = drop(x.t(), p=0.3, training=True).t() + drop(2 * x, 0.5, True, True)
        x = x + drop(x, 0.0) + drop(x, 1.0) + drop(x, training=False) + drop(x[:0]).sum()
        heads = x.view(1, 1, *x.shape)
        y = attend(heads, heads, heads) + attend(heads, heads, heads, None, 0.3)
        return (y + attend(query=heads, key=heads, value=heads)).view(x.shape)


@pytest.mark.parametrize("kind", [Uniform, Sampled, Dropped])
@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_whatever_a_layer_draws_with_is_reproducible_in_every_step(
    kind: type[nn.Module], backend: str, recompute: str
) -> None:
    """Threads see all operators in a first step, and in later ones only what they have to."""
    model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6), kind(), nn.Linear(6, 6))
    batch = torch.rand(8, 6), torch.randn(8, 6)
    with Pipeline(
        model, mse_loss, num_ranks=3, num_microbatches=4, backend=backend, recompute=recompute
    ) as pipe:
        for _ in range(3):
            pipe.verify(*batch)
            pipe.step(*batch)


def test_a_dropout_whose_probability_changes_is_reproducible_at_once() -> None:
    model = nn.Sequential(Block(0.0), Block(0.0), nn.Linear(6, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=4)
    batch = torch.randn(8, 6), torch.randn(8, 3)
    pipe.step(*batch)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    pipe.verify(*batch)
    pipe.close()


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(nn.functional.dropout(output, 0.5), target)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_loss_that_draws_is_reproducible_from_the_first_step_on(backend: str) -> None:
    batch = torch.randn(8, 6), torch.randn(8, 3)
    gradients = []
    for num_ranks in (1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        with Pipeline(
            model, noisy_loss, num_ranks=num_ranks, num_microbatches=4, backend=backend
        ) as pipe:
            pipe.step(*batch)
            pipe.step(*batch)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, three in zip(*gradients, strict=True):
        assert one is not None
        assert three is not None
        assert torch.equal(one, three)


class Again(nn.Module):
    """One weight that is used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_autocast_on_threads_casts_weights_as_a_plain_loop_does(schedule: str) -> None:
    model = nn.Sequential(*(Again() for _ in range(4)), nn.Linear(16, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=4, num_microbatches=8, schedule=schedule)
    batch = torch.randn(32, 16), torch.randn(32, 3)
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.verify(*batch)
    pipe.close()


def test_gradients_of_gradients_through_an_output_are_refused() -> None:
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2)
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(ModelError, match="gradients of gradients were requested"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)
    pipe.close()


def test_an_input_that_no_layer_reads_is_refused() -> None:
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2)
    with pytest.raises(BatchError, match="inputs have mask, but layers read only x"):
        pipe.step(torch.randn(4, 6), torch.randn(4, 3), mask=torch.ones(4, 6))
    pipe.close()


def test_a_layer_that_writes_two_values_returns_two() -> None:
    model = [Layer("both", nn.Linear(6, 6), writes=("x", "y")), Layer("next", nn.Linear(6, 3))]
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2)
    with pytest.raises(StageError, match="layer 'both' returned one value, but writes x, y"):
        pipe.step(torch.randn(4, 6), torch.randn(4, 3))
    with pytest.raises(ModelError, match="layer 'a' writes 'memory', but this has to be a tuple"):
        Layer("a", nn.Linear(6, 6), writes="memory")  # type: ignore[arg-type]
    pipe.close()


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_evaluation_works_in_inference_mode(backend: str) -> None:
    pipe = Pipeline(blocks(lambda m: m), mse_loss, num_ranks=2, num_microbatches=2, backend=backend)
    with torch.inference_mode():
        output = pipe(torch.randn(4, 6))
    assert output.shape == (4, 6)
    pipe.close()

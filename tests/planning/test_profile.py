"""Profiles: what is counted, what is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.errors import BatchError, PlanError, StageError
from stageline.model.inputs import named_inputs
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.planning.profiling.estimate import estimate
from stageline.planning.profiling.measure import profile
from stageline.planning.profiling.profile import LayerCost, Measurement, Profile, Tied, ValueCost
from stageline.planning.profiling.rates import measure_rates
from stageline.planning.profiling.samples import resized
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.checks import edges_of
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import ForwardArgs, InFlight, Target
from stageline.zoo.cases import CASES, make_case
from stageline.zoo.emulated import Occupy

WIDTH, SAMPLES = 8, 4
TENSOR = SAMPLES * WIDTH * 4  # bytes of what a layer writes for a micro-batch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def of_one_size(model: Any, sample: Any = None, **options: Any) -> Measurement:
    """Quickly."""
    sample = torch.randn(SAMPLES, WIDTH) if sample is None else sample
    return profile(model, sample, sizes=[SAMPLES], repeats=1, **options).measurements[0]


def kept(found: Measurement) -> list[tuple[float, float, float]]:
    return [(layer.activation, layer.retained, layer.waiting) for layer in found.layers]


# What layers keep, by hand: (from F until I, the part until W, gradients from I until W).


def test_a_linear_keeps_its_input_which_is_counted_where_it_was_written() -> None:
    """The first one's input is the loader's, the last one's output nobody needs."""
    found = of_one_size([linear(), linear()])
    assert kept(found) == [(TENSOR, TENSOR, TENSOR), (0, 0, TENSOR)]


def test_a_relu_and_the_linear_after_it_keep_one_tensor() -> None:
    found = of_one_size([linear(), nn.ReLU(), linear()])
    assert kept(found) == [(0, 0, TENSOR), (TENSOR, TENSOR, 0), (0, 0, TENSOR)]
    assert [value.unsaved for value in found.values] == [0, TENSOR, 0]


def test_a_relu_in_place_keeps_one_tensor_too() -> None:
    found = of_one_size([linear(), nn.ReLU(inplace=True), linear()])
    assert kept(found) == [(0, 0, TENSOR), (TENSOR, TENSOR, 0), (0, 0, TENSOR)]


def test_a_layer_norm_keeps_its_input_and_two_numbers_for_each_sample() -> None:
    found = of_one_size([linear(), nn.LayerNorm(WIDTH)])
    numbers = 2 * SAMPLES * 4
    assert kept(found) == [(TENSOR, TENSOR, TENSOR), (numbers, numbers, TENSOR)]


def test_dropout_keeps_its_mask_until_the_input_gradient() -> None:
    assert kept(of_one_size([linear(), nn.Dropout(0.5)])) == [(0, 0, TENSOR), (TENSOR, 0, 0)]


def test_a_layer_without_weights_to_learn_keeps_nothing() -> None:
    frozen = [linear().requires_grad_(False), linear().requires_grad_(False)]
    assert kept(of_one_size(frozen)) == [(0, 0, 0), (0, 0, 0)]


def test_views_are_of_the_storage_that_they_show() -> None:
    found = of_one_size([linear(), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Linear(4, 4)])
    assert [layer.activation for layer in found.layers] == [0, TENSOR, 0, 0]


class Product(nn.Module):
    """Saves both of what it reads."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x * skip


def with_skip() -> LayerSequence:
    return LayerSequence(
        (
            Layer("write", linear(), writes=("skip",)),
            Layer("first", linear(), reads=("skip",)),
            Layer("second", Product(), reads=("x", "skip")),
        )
    )


def test_a_skip_that_two_layers_keep_is_counted_once() -> None:
    found = of_one_size(with_skip())
    assert [layer.activation for layer in found.layers] == [TENSOR, TENSOR, 0]
    assert found.values == (
        ValueCost(INPUT, (0,), TENSOR),
        ValueCost(0, (1, 2), TENSOR, let_go=(0, 2)),
        ValueCost(1, (2,), TENSOR, let_go=(1, 2)),
    )


def tied_embedding() -> nn.Sequential:
    embedding, head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def test_a_tied_embedding_is_part_of_both_layers_and_named_as_one() -> None:
    tokens = torch.randint(10, (SAMPLES, 3))
    found = profile(tied_embedding(), tokens, sizes=[SAMPLES], repeats=1)
    layers = found.measurements[0].layers
    assert [layer.parameters for layer in layers] == [10 * WIDTH * 4] * 2
    assert found.tied == (Tied((0, 1), 10 * WIDTH * 4),)
    assert kept(found.measurements[0]) == [
        (3 * TENSOR, 3 * TENSOR, 3 * TENSOR),
        (0, 0, SAMPLES * 3 * 10 * 4),
    ]


def test_parameters_and_buffers_are_those_of_the_layer() -> None:
    layer = of_one_size([linear(), nn.BatchNorm1d(WIDTH)]).layers[1]
    assert (layer.parameters, layer.buffers) == (2 * WIDTH * 4, 2 * WIDTH * 4 + 8)


def test_the_loss_is_part_of_the_last_layer() -> None:
    """Cross entropy keeps a probability for each class, and the sum of its weights."""
    target = torch.randint(WIDTH, (SAMPLES,))
    with_loss = of_one_size([linear()], loss_fn=cross_entropy, target=target)
    assert [layer.activation for layer in with_loss.layers] == [TENSOR + 4]
    assert [layer.activation for layer in of_one_size([linear()]).layers] == [0]


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """All storages that operators made, as long as anybody holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self, *without: Tensor | None) -> int:
        apart = {t.untyped_storage()._cdata for t in without if t is not None}
        found = {key: reference() for key, reference in self.storages.items()}
        return sum(
            int(s.nbytes()) for key, s in found.items() if s is not None and key not in apart
        )


@pytest.mark.parametrize("name", CASES)
def test_a_stage_of_all_layers_holds_their_sum_to_the_byte(name: str) -> None:
    case = make_case(name)
    inputs, target = case.batches[0]
    length = len(pytree.tree_leaves(target)[0])
    found = profile(
        case.layers, inputs, loss_fn=case.loss_fn, target=target, sizes=[length], repeats=1
    ).measurements[0]

    tied = TiedWeights.of(case.layers)
    stage = Stage(case.layers, range(len(case.layers)), (), tied, "minibatch")
    named = inputs if isinstance(inputs, dict) else {"x": inputs}
    values = {Value(INPUT, key): value for key, value in named.items()}
    context = ForwardContext.current()
    this = ForwardArgs(
        0, values, Target(case.loss_fn, target, 1.0), 0, 0, 0, context, in_halves=True
    )
    stage.forward(this, InFlight())  # a layer is watched at first
    stage.inner_gradients.stop_observing()
    stage.statistics.clear()
    waiting, alive = InFlight(), Alive()
    with alive:
        loss = stage.forward(this._replace(context=ForwardContext.current()), waiting).loss
        stage.statistics.clear()
        brought = [t for t in pytree.tree_leaves((inputs, target)) if isinstance(t, Tensor)]
        weights = list(case.layers.modules.parameters())
        there = [loss, *brought, *weights, *case.layers.modules.buffers()]
        assert alive.num_bytes(*there) == sum(layer.activation for layer in found.layers)
        stage.backward(0, {}, waiting, in_halves=True)
        there += [weight.grad for weight in weights]
        there += [double.grad for _, doubles in tied.by_weight for _, double in doubles]
    kept_until_w = sum(layer.retained + layer.waiting for layer in found.layers)
    assert alive.num_bytes(*there) == kept_until_w


@pytest.mark.parametrize("name", CASES)
def test_a_stage_holds_what_it_sends_even_if_no_layer_saves_it(name: str) -> None:
    """Wherever the cut is: in the ResNet between BatchNorm and a ReLU that works in place."""
    case = make_case(name)
    inputs, _ = case.batches[0]
    found = of_one_size(case.layers, inputs)
    for end in range(1, len(case.layers)):
        sent = [v for v in found.values if 0 <= v.writer < end <= max(v.readers)]
        expected = sum(layer.activation for layer in found.layers[:end])
        assert held_by_first(case.layers, end, inputs) == expected + sum(v.unsaved for v in sent)


def held_by_first(layers: LayerSequence, end: int, inputs: Any) -> int:
    """By a stage of the first layers, between its forward and its backward."""
    _, (sent, _) = edges_of(layers, (range(end), range(end, len(layers))))
    stage = Stage(layers, range(end), sent, TiedWeights.of(layers), "minibatch")
    brought = resized(named_inputs(layers, inputs), SAMPLES)
    values = {Value(INPUT, name): value for name, value in brought.items()}
    this = ForwardArgs(0, values, None, 0, 0, 0, ForwardContext.current())
    stage.forward(this, InFlight())
    waiting, alive = InFlight(), Alive()
    with alive:
        stage.forward(this, waiting)
        stage.statistics.clear()
    tensors = [t for t in pytree.tree_leaves(brought) if isinstance(t, Tensor)]
    return alive.num_bytes(*tensors, *layers.modules.parameters(), *layers.modules.buffers())


# Sizes and batches of every sort


def test_sizes_are_a_quarter_a_half_and_all_of_the_sample_unless_given() -> None:
    found = profile([linear()], torch.randn(8, WIDTH), repeats=1)
    assert [each.samples for each in found.measurements] == [2, 4, 8]
    found = profile([linear()], torch.randn(2, WIDTH), sizes=(5, 1), repeats=1)
    assert [each.samples for each in found.measurements] == [1, 5]
    assert [each.values[0].size for each in found.measurements] == [WIDTH * 4, 5 * WIDTH * 4]


def test_inputs_by_name_with_values_that_are_no_tensors() -> None:
    case = make_case("branches")
    inputs, target = case.batches[0]
    found = of_one_size(case.layers, inputs, loss_fn=case.loss_fn, target=target)
    sizes = {(value.writer, len(value.readers)): value.size for value in found.values}
    assert sizes[0, 3] == 0  # the length, which the first layer writes as a number
    assert sizes[INPUT, 3] == 0  # the scale
    assert max(value.size for value in found.values) == SAMPLES * 5 * 6 * 4


class AddPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_inputs_in_a_tuple() -> None:
    pair = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    found = of_one_size([AddPair(), linear()], pair)
    assert found.values[0].size == 2 * TENSOR


# Times


def test_a_layer_that_takes_ten_times_as_long_is_found_to_take_longer() -> None:
    slow, fast = Occupy(0.02, 0.02, 0.02), Occupy(0.002, 0.002, 0.002)
    found = profile([fast, slow], torch.ones(2, 1), sizes=[2], repeats=3).measurements[0].layers
    for time in ("forward", "input_grad", "weight_grad"):
        assert getattr(found[1], time) > getattr(found[0], time)


class Irregular(nn.Module):
    """In every other round it takes 40 ms longer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        sleep(0.04 * (self.calls // 2 % 2))
        return x


def test_a_layer_whose_times_vary_is_found_to_vary() -> None:
    found = profile([nn.Identity(), Irregular()], torch.ones(2, 1), sizes=[2], repeats=8)
    steady, irregular = found.measurements[0].layers
    assert irregular.spread > 0.01
    assert irregular.spread > steady.spread
    assert "is something else running?" in str(found)


def test_a_single_round_says_nothing_of_how_times_vary() -> None:
    assert of_one_size([linear()]).layers[0].spread == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_at_once_count_the_same_bytes(ranks: int) -> None:
    case = make_case("gpt")
    inputs, target = case.batches[0]
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target}
    alone = of_one_size(case.layers, inputs, **options)
    together = of_one_size(case.layers, inputs, ranks=ranks, **options)
    assert kept(alone) == kept(together)
    assert all(layer.forward > 0 for layer in together.layers)


# Left as it was


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, tensor.clone(), id(tensor), tensor.requires_grad) for name, tensor in tensors],
        [None if p.grad is None else (p.grad.clone(), id(p.grad)) for p in model.parameters()],
        [part.training for part in model.modules()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_is_left_as_it_was(ranks: int) -> None:
    norm, frozen = nn.BatchNorm1d(WIDTH), linear().requires_grad_(False)
    model = nn.Sequential(linear(), norm, nn.Dropout(0.5), frozen, nn.Dropout(0.1).eval(), linear())
    model(torch.randn(SAMPLES, WIDTH)).sum().backward()
    model[5].zero_grad()
    base = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    sample, target = base * 2, torch.randn(SAMPLES, WIDTH)
    before = state(model)
    profile(model, sample, loss_fn=mse_loss, target=target, sizes=[2, 6], repeats=1, ranks=ranks)
    compared = zip(pytree.tree_leaves(before), pytree.tree_leaves(state(model)), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in compared)
    assert base.grad is None
    (gradient,) = torch.autograd.grad(sample.sum(), base)
    assert torch.equal(gradient, torch.full_like(base, 2.0))


def test_nothing_is_printed_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    profile([Occupy(0.1, 0.0, 0.0)], torch.ones(4, 1), repeats=1)  # more than a second
    assert capfd.readouterr() == ("", "")


# Refused


def test_a_model_on_the_meta_device_is_sent_to_estimate() -> None:
    with torch.device("meta"):
        model = nn.Sequential(linear(), nn.ReLU())
    with pytest.raises(PlanError, match=r"layer '0' is on the meta device, .* estimate\(\)"):
        profile(model, torch.randn(SAMPLES, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [0]}, r"sizes is \[0\], but has to hold numbers of samples from 1 up"),
        ({"sizes": []}, r"sizes is \[\]"),
        ({"sizes": [2.5]}, r"sizes is \[2.5\]"),
        ({"repeats": 0}, "repeats is 0, but has to be a whole number from 1 up"),
        ({"ranks": True}, "ranks is True"),
        ({"target": torch.ones(SAMPLES)}, "there is a target, but no loss_fn"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        profile([linear()], torch.randn(SAMPLES, WIDTH), **options)


def test_a_sample_that_does_not_fit_is_told() -> None:
    with pytest.raises(BatchError, match="layers read skip before any layer writes it"):
        profile([Layer("a", linear(), reads=("skip",))], torch.randn(SAMPLES, WIDTH))
    with pytest.raises(StageError, match=r"layer '1' failed on inputs of shapes \(4, 8\)"):
        of_one_size([linear(), nn.Linear(3, 3)])


# From shapes alone


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("gpt", "unet") else n for n in CASES],
)
def test_an_estimate_has_the_bytes_of_a_measurement(name: str) -> None:
    case = make_case(name)
    inputs, target = case.batches[0]
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target, "sizes": [2, 4]}
    measured = profile(case.layers, inputs, repeats=1, **options)
    estimated = estimate(case.layers, inputs, flops=1e12, bandwidth=1e11, **options)
    assert estimated.names == measured.names
    assert estimated.tied == measured.tied
    for a, b in zip(estimated.measurements, measured.measurements, strict=True):
        assert kept(a) == kept(b)
        assert a.values == b.values
        assert [x.parameters + x.buffers for x in a.layers] == [
            x.parameters + x.buffers for x in b.layers
        ]


def test_an_estimate_needs_no_memory_for_the_model() -> None:
    """A hundred billion parameters."""
    side = 2**18
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(side, side, bias=False), nn.Linear(side, 4, bias=False))
        sample = torch.empty(8, side)
    first, last = estimate(model, sample, flops=1e14, bandwidth=1e12, sizes=[8]).at(8).layers
    assert first.parameters == 4 * side**2
    assert first.forward == pytest.approx((4 * side**2 + 2 * 4 * 8 * side) / 1e12)  # its bytes
    assert first.input_grad == 0  # the loader wants no gradient
    assert first.weight_grad > 3 * first.forward  # written, then read and added to what is there
    assert last.input_grad > 0


def test_an_estimate_knows_the_flops_of_attention() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    sample = torch.empty(2, 4, 64, 16, device="meta")
    layer = estimate([Attend()], sample, flops=1e9, bandwidth=1e15, sizes=[2]).at(2).layers[0]
    assert layer.forward == pytest.approx(2 * 2 * 4 * 64 * 64 * (16 + 16) / 1e9)


def test_a_layer_that_looks_at_data_cannot_be_estimated() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match=r"layer '0' failed(.|\n)*an estimate has only shapes"):
        estimate([Looks()], torch.ones(2, 2), flops=1e12, bandwidth=1e11)


def test_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlanError, match="bandwidth is 0, but has to be a number above 0"):
        estimate([linear()], torch.ones(2, WIDTH), flops=1e12, bandwidth=0)


def test_rates_of_this_machine() -> None:
    flops, bandwidth = measure_rates("cpu")
    assert flops > 1e8
    assert bandwidth > 1e8


# Files


def example() -> Profile:
    def measurement(samples: int, seconds: float) -> Measurement:
        layer = LayerCost(seconds, 2 * seconds, seconds, 100.0 * samples, 60.0 * samples, 40, 8)
        return Measurement(samples, (layer, layer), (ValueCost(0, (1,), 32.0 * samples),))

    return Profile(("a", "b"), (measurement(1, 1.0), measurement(3, 2.0)), device="cpu")


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    measured = profile(tied_embedding(), torch.randint(10, (2, 3)), repeats=1)
    for number, found in enumerate((example(), measured)):
        found.save(tmp_path / f"{number}.json")
        assert Profile.load(tmp_path / f"{number}.json") == found


def test_a_profile_prints_what_layers_cost_and_how_much_that_varies() -> None:
    first = LayerCost(0.010, 0.008, 0.002, 2**20, 2**20, 2**10, 0, spread=0.001)
    last = LayerCost(0.020, 0.020, 0.040, 0, 0, 2**11, 0)
    found = Profile(("0", "head"), (Measurement(4, (first, last), ()),), device="cpu")
    assert [line.rstrip() for line in str(found).splitlines()] == [
        "a micro-batch of 4 samples, on cpu",
        "layer  forward, ms  backward, ms         activation  parameters",
        "0               10            10  ± 5 %        1MiB        1KiB",
        "head            20            60                 0B        2KiB",
    ]


def test_times_that_vary_much_are_remarked_on_if_they_are_a_large_part_of_all() -> None:
    def of(short: float, long: float) -> str:
        layers = (
            LayerCost(0.001, 0.001, 0.001, 0, 0, 0, 0, spread=short),
            LayerCost(0.020, 0.020, 0.020, 0, 0, 0, 0, spread=long),
        )
        return str(Profile(("a", "b"), (Measurement(1, layers, ()),)))

    assert "times vary by" not in of(short=0.003, long=0.006)
    assert of(short=0.0, long=0.021).endswith("times vary by ± 33 %: is something else running?")


def test_a_profile_written_before_spreads_were_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(edited()))
    assert Profile.load(path).measurements[0].layers[0].spread == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LayerCost(-1.0, 1, 1, 1, 1, 1, 1),
            "LayerCost has a fault at forward: input should be greater than or equal to 0",
        ),
        (lambda: LayerCost(1, 1, 1, 1, 1, 1, 1, spread=-1), "LayerCost has a fault at spread"),
        (lambda: LayerCost(1.0), "LayerCost has a fault at input_grad: field required"),  # type: ignore[call-arg]  # meant
        (lambda: ValueCost(-2, (0,), 1), "ValueCost has a fault at writer"),
        (lambda: Measurement(0, (), ()), "Measurement has a fault at samples"),
        (lambda: Measurement(1, ("fast",), ()), r"Measurement has a fault at layers\.0"),  # type: ignore[arg-type]  # meant
        (lambda: Tied((0, 1), float("nan")), "Tied has a fault at parameters"),
        (lambda: Profile(("a",), ()), r"^measurements are of \[\] samples, but have to ascend$"),
        (lambda: replace(example(), names=("a",)), "^1 layers have names, but 2 have costs"),
    ],
)
def test_what_cannot_be_is_refused_in_python_too(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_between_and_beyond_measured_sizes_costs_are_on_a_line() -> None:
    for samples, seconds in ((1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0)):
        found = example().at(samples)
        layer = found.layers[0]
        assert (found.samples, layer.forward) == (samples, seconds)
        assert (layer.activation, layer.retained) == (100 * samples, 60 * samples)
        assert (layer.parameters, layer.buffers) == (40, 8)
        assert found.values[0].size == 32 * samples


def test_a_profile_of_one_size_grows_with_the_samples() -> None:
    whole = example()
    layer = Profile(whole.names, whole.measurements[1:]).at(6).layers[0]
    assert (layer.forward, layer.activation, layer.parameters) == (4.0, 600, 40)


def edited(**changes: Any) -> Any:
    """The example as a file holds it, with a change to its first layer's costs."""
    layer: dict[str, Any] = {
        "forward": 1, "input_grad": 1, "weight_grad": 1, "activation": 1, "retained": 1,
        "parameters": 1, "buffers": 1,
    }  # fmt: skip
    layer = {name: cost for name, cost in (layer | changes).items() if cost is not None}
    return {"names": ["a"], "measurements": [{"samples": 1, "layers": [layer], "values": []}]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (edited(forward=-1), r"forward: .* greater than or equal to 0 \(it is -1\)"),
        (edited(forward=float("inf")), r"forward: .* finite"),
        (edited(forward="slow"), r"forward: input should be a number"),
        (edited(forward=None), "forward: field required"),
        (edited(backward=1), "backward: unexpected keyword argument"),
        (edited() | {"names": ["a", "b"]}, "2 layers have names, but 1 have costs"),
        (edited() | {"measurements": []}, "have to ascend"),
        ([], "has a fault at it"),
    ],
)
def test_a_file_with_a_fault_is_refused(tmp_path: Path, contents: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(PlanError, match=message):
        Profile.load(path)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        Profile.load(path)
    path.write_text("forward: 1")
    with pytest.raises(PlanError, match="invalid json"):
        Profile.load(path)


def test_beyond_what_was_measured_more_samples_do_not_cost_less() -> None:
    def measured(samples: int, time: float) -> Measurement:
        return Measurement(samples, (LayerCost(time, time, time, 10 * samples, 0, 0, 0),), ())

    noisy = Profile(("a",), (measured(2, 1.1), measured(4, 1.0)))
    assert noisy.at(100).layers[0].forward == 1.0
    assert noisy.at(100).layers[0].activation == 1000


def test_what_a_layer_needs_for_a_moment_is_measured_and_estimated_alike() -> None:
    """A gradient of the weight that is added to the one there, and those of output and input."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16))
    measured = profile(model, torch.ones(4, 8), repeats=1, progress=False).at(4)
    estimated = estimate(model, torch.ones(4, 8), flops=1e9, bandwidth=1e9).at(4)
    first, second = (layer.momentary for layer in measured.layers)
    assert [layer.momentary for layer in estimated.layers] == [first, second]
    weight, bias, output, inputs = 4 * 32 * 16, 4 * 16, 4 * 4 * 16, 4 * 4 * 32
    assert weight + output <= second <= weight + bias + output + inputs
    assert first < 4 * 32 * 8 + 4 * 32 + 4 * 4 * 32 + 4 * 4 * 8


def test_what_later_layers_have_freed_is_there_for_a_moment_in_earlier_ones() -> None:
    layers = (
        LayerCost(1, 1, 1, 10, 0, 0, 0, momentary=9),
        LayerCost(1, 1, 1, 7, 0, 0, 0, momentary=4),
    )
    measurement = Measurement(1, layers, ())
    assert measurement.momentary(range(2)) == 4
    assert measurement.momentary(range(1)) == 9

"""Weights that are not parameters of a layer, and state that stages share, work or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError, StageError
from stageline.model.layers import Layer, LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped


@pytest.fixture(params=["serial", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def pipedream(layers: list[nn.Module], backend: str, **options: Any) -> Pipeline:
    return Pipeline(
        layers,
        mse_loss,
        num_ranks=3,
        num_microbatches=1,
        schedule="pipedream",
        optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1),
        backend=backend,
        **grouped(options),
    )


class Product(nn.Module):
    """Multiplies by weights that it holds in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.eye(4))
        self.way = way
        if way != "hidden":
            self.weight = weight
        self.held: Any = {"list": [weight], "hidden": {"a": weight}}.get(way)
        if way == "closure":
            self.held = lambda x: x @ weight

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor
        if self.way == "closure":
            product = self.held(x)
        elif self.way == "name":
            product = x @ self.weight
        else:
            product = x @ (self.held[0] if self.way == "list" else self.held["a"])
        return product


DATA = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(6)]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("list", "the weight '0.weight' is used, but not by its name"),
        ("closure", "the weight '0.weight' is used, but not by its name"),
        ("hidden", r"a weight of shape \(4, 4\) is used that is no parameter of any layer"),
    ],
)
def test_versions_are_not_kept_of_weights_in_plain_attributes(
    way: str, message: str, backend: str
) -> None:
    pipe = pipedream([Product(way), nn.Linear(4, 4), nn.Linear(4, 4)], backend)
    with pytest.raises(StageError, match=message):
        list(pipe.run(DATA))
    pipe.close()


def test_weights_by_name_and_in_lists_of_parameters_are_fine(backend: str) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.eye(4)) for _ in range(2)])
            self.same = list(self.weights)  # never used
            self.unit = nn.GRU(4, 4, batch_first=True)  # keeps its weights in a list, too

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.unit((x @ self.weights[0] @ self.weights[1])[:, None])[0][:, 0]
            return out

    pipe = pipedream([Product("name"), Listed(), nn.Linear(4, 4)], backend)
    assert len(list(pipe.run(DATA))) == 6
    pipe.close()


def test_trained_tensors_that_are_no_parameters_are_refused_where_versions_are_kept() -> None:
    layer = nn.Linear(4, 4)
    layer.scales = [torch.ones(4, requires_grad=True)]  # type: ignore[assignment]
    with pytest.raises(
        ModelError, match=r"^'1.scales' requires gradients and is no parameter, but"
    ):
        pipedream([nn.Linear(4, 4), layer, nn.Linear(4, 4)], "serial")
    Pipeline([nn.Linear(4, 4), layer], mse_loss, num_ranks=2, num_microbatches=2).close()


class Tied(nn.Module):
    """Uses another layer's weight, registered or not."""

    def __init__(self, other: nn.Linear, *, is_registered: bool) -> None:
        super().__init__()
        if is_registered:
            self.weight = other.weight
        self.held = [other.weight]
        self.reads_name = False

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = x @ (self.weight if self.reads_name else self.held[0])
        return product


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("is_registered", [True, False])
def test_a_weight_of_another_layer_is_shared_by_name_or_refused(
    schedule: str, recompute: str, is_registered: bool, backend: str
) -> None:
    first = nn.Linear(4, 4, bias=False)
    tied = Tied(first, is_registered=is_registered)
    pipe = Pipeline(
        [first, nn.Tanh(), tied],
        mse_loss,
        num_ranks=3,
        num_microbatches=3,
        schedule=schedule,
        recompute=recompute,
        backend=backend,
    )
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with pytest.raises(StageError, match=r"the weight '(0|2).weight' is used, but not by its name"):
        pipe.step(x, y)
    with pytest.raises(StageError, match=r"the weight '(0|2).weight' is used, but not by its name"):
        pipe.verify(x, y)
    if is_registered:
        tied.reads_name = True
        pipe.step(x, y)
        pipe.verify(x, y)
    pipe.close()


def test_a_weight_of_no_layer_is_fine_in_one_stage_and_refused_in_two() -> None:
    weight = nn.Parameter(torch.eye(4))

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ weight

    def pipe(*layers: nn.Module) -> Pipeline:
        return Pipeline(list(layers), mse_loss, num_ranks=2, num_microbatches=2, backend="serial")

    pipe(Outside(), nn.Linear(4, 4)).step(*DATA[0])
    with pytest.raises(StageError, match="no parameter of any layer, but several stages use it"):
        pipe(Outside(), Outside()).step(*DATA[0])


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("mode", ["minibatch", "microbatch"])
def test_running_statistics_of_two_stages_are_refused_and_of_one_are_right(
    kind: Any, mode: str, backend: str
) -> None:
    def norm(**more: Any) -> nn.Module:
        made: nn.Module = kind(4, affine=False, **more)
        return made

    def pipe(shared: nn.Module, balance: list[int]) -> Pipeline:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4)]
        return Pipeline(
            layers,
            mse_loss,
            num_ranks=2,
            num_microbatches=3,
            balance=balance,
            backend=backend,
            options=Options(batch_norm=mode),
        )

    batch = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    message = r"^layers '1' and '3' are in different stages and share a (Batch|Instance)Norm1"
    with pytest.raises(ModelError, match=message):
        pipe(norm(track_running_stats=True), [2, 3])
    together = pipe(norm(track_running_stats=True), [4, 1])
    together.step(*batch)
    together.verify(*batch)
    apart = pipe(norm(track_running_stats=False), [2, 3])
    apart.verify(*batch)
    together.close()
    apart.close()


def test_a_buffer_that_stages_of_a_stream_share_and_change_is_refused(backend: str) -> None:
    shared = Average(moves="in place")
    pipe = pipedream([nn.Linear(4, 4), shared, shared], backend)
    with pytest.raises(ModelError, match=r"the buffer '1.mean' was changed by a forward, but"):
        list(pipe.run(DATA[:2]))
    pipe.close()


class Average(nn.Module):
    """Has a constant table, and maybe a buffer that its forward changes."""

    table: Tensor
    mean: Tensor

    def __init__(self, *, moves: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("mean", torch.zeros(4))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.moves == "in place":
            self.mean.lerp_(mean, 0.5)
        elif self.moves == "anew":
            self.mean = 0.5 * self.mean + 0.5 * mean
        return x * self.table + self.mean


@pytest.mark.parametrize("moves", ["no", "in place", "anew"])
def test_a_shared_buffer_is_refused_if_a_stage_changes_it(moves: str, backend: str) -> None:
    shared = Average(moves=moves)
    layers = [nn.Linear(4, 4), shared, nn.Linear(4, 4), shared]
    pipe = Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=3, backend=backend)
    for _ in range(2):
        if moves == "no":
            pipe.step(*DATA[0])
            pipe.verify(*DATA[0])
        else:
            with pytest.raises(
                ModelError, match=r"the buffer '1.mean' was changed by a forward, but"
            ):
                pipe.step(*DATA[0])
    pipe.close()
    together = Pipeline(
        layers, mse_loss, num_ranks=1, num_microbatches=3, backend=backend, recompute="never"
    )
    together.step(*DATA[0])
    together.close()


@pytest.mark.parametrize(
    ("lazy", "name"),
    [
        (nn.LazyLinear(3), "1.weight"),
        (nn.LazyBatchNorm1d(), "1.weight"),
        (nn.LazyInstanceNorm1d(affine=False, track_running_stats=True), "1.running_mean"),
        (nn.ModuleList([nn.Linear(4, 4), nn.LazyConv1d(3, 1)]), "1.1.weight"),
    ],
)
def test_a_lazy_module_is_refused_with_what_to_do(lazy: nn.Module, name: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^'{name}' has no shape yet, .* run the model once on example inputs"
    ):
        Pipeline([nn.Linear(4, 4), lazy], mse_loss, num_ranks=2, num_microbatches=2)
    with pytest.raises(ModelError, match=rf"^'{name}' has no shape yet"):
        LayerSequence.of(LayerSequence((Layer("0", nn.ReLU()), Layer("1", lazy))))


def test_a_lazy_module_that_has_run_once_is_fine() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))
    model(torch.randn(2, 5))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    pipe.verify(torch.randn(4, 5), torch.randn(4, 3))

"""`Pipeline`: losses, evaluation, names, traces and errors."""

from __future__ import annotations

import copy
import os
import signal
from collections import UserList
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from stageline.errors import BatchError, ModelError, ParityError, ScheduleError, StageError
from stageline.model.layers import Layer, LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.schedules.schedule import Schedule


def chain() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_samples", [12, 10, 3])
def test_the_loss_is_the_mean_over_the_mini_batch(num_samples: int) -> None:
    """Even, uneven, and fewer samples than micro-batches."""
    model = chain()
    x, y = torch.randn(num_samples, 4), torch.randn(num_samples, 3)
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=4)
    result = pipe.step(x, y)
    whole = copy.deepcopy(model)
    whole.zero_grad()
    loss = mse_loss(whole(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(gradients(model), gradients(whole))
    pipe.close()


def test_with_a_count_the_loss_is_the_mean_over_what_counts() -> None:
    """Padding does not count; one micro-batch is padding only."""
    model = chain()
    x, y = torch.randn(6, 4), torch.tensor([0, 2, -100, -100, 1, -100])

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="sum")

    pipe = Pipeline(
        model,
        summed,
        num_ranks=2,
        num_microbatches=3,
        options=Options(count_fn=lambda target: (target != -100).sum()),
    )
    result = pipe.step(x, y)
    whole = copy.deepcopy(model)
    whole.zero_grad()
    loss = cross_entropy(whole(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(gradients(model), gradients(whole))
    pipe.close()


def test_two_steps_without_zero_grad_add_up() -> None:
    model = chain()
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=4, schedule="zb_h1")
    pipe.step(x, y)
    once = [gradient.clone() for gradient in gradients(model)]
    pipe.step(x, y)
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in once])
    pipe.close()


def test_evaluation_gives_the_model_s_output_and_leaves_gradients_alone() -> None:
    model = chain()
    x, y = torch.randn(7, 4), torch.randn(7, 3)
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=4, schedule="zb_h2")
    pipe.step(x, y)
    before = [gradient.clone() for gradient in gradients(model)]
    with torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split([2, 2, 2, 1])]))  # type: ignore[no-untyped-call]
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    pipe.close()


def test_parameters_keep_the_names_they_have_in_the_model() -> None:
    model = chain()
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2)
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
    pipe.close()


def test_gradients_are_clipped_by_their_global_norm() -> None:
    model = chain()
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=2)
    pipe.step(torch.randn(4, 4), 10 * torch.randn(4, 3))
    norm = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norm)
    after = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm()
    torch.testing.assert_close(after, torch.tensor(0.5))
    pipe.close()


def test_autocast_of_the_caller_reaches_the_ranks() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x.float()

    model = nn.Sequential(nn.Linear(4, 4), Spy(), nn.Linear(4, 3), Spy())
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, recompute="always")
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(torch.randn(4, 4), torch.randn(4, 3))
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 2 * 2 * 2  # twice for each layer and micro-batch, once to recompute
    pipe.close()


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_trace_has_every_action_in_the_order_of_the_schedule(backend: str) -> None:
    pipe = Pipeline(
        chain(), mse_loss, num_ranks=2, num_microbatches=3, schedule="zb_h1", backend=backend
    )
    with pipe.trace() as trace:
        pipe.step(torch.randn(6, 4), torch.randn(6, 3))
    timeline = trace.timeline
    assert [tuple(span.action for span in row) for row in timeline.spans] == list(
        pipe.schedule.actions
    )
    for row in timeline.spans:
        assert all(a.end <= b.start for a, b in pairwise(row))
    assert 0 < timeline.step_bubble < 1
    assert str(timeline).startswith("rank 0 │ ")
    pipe.close()


@pytest.mark.parametrize("how", ["list", "layers", "sequence"])
def test_train_switches_all_modules_that_were_given(how: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5)))
    outer = nn.Sequential(inner, nn.Linear(4, 3))
    given = {
        "list": [inner, outer[1]],
        "layers": [Layer("a", inner), Layer("b", nn.Sequential(nn.Linear(4, 3)))],
        "sequence": LayerSequence.of(outer),
    }[how]
    pipe = Pipeline(given, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")  # type: ignore[arg-type]
    containers = [inner, inner[1], *([outer] if how == "sequence" else [])]
    for is_training in (False, True):
        pipe.train(is_training)
        assert {part.training for whole in containers for part in whole.modules()} == {is_training}
        assert {layer.module.training for layer in pipe.layers} == {is_training}


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_the_timeline_of_a_trace_exists_after_its_block_and_not_in_it(backend: str) -> None:
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=3, backend=backend)
    with pipe.trace() as trace:
        for when in ("before", "after"):
            with pytest.raises(ModelError, match="the trace is not over: read its timeline after"):
                trace.timeline  # noqa: B018
            if when == "before":
                pipe.step(torch.randn(6, 4), torch.randn(6, 3))
    timeline = trace.timeline
    assert timeline.makespan == max(row[-1].end for row in timeline.spans) > 0
    assert min(timeline.busy) > 0
    assert timeline.num_ranks == 2
    with pipe.trace() as trace:
        pass
    nothing = trace.timeline
    assert (nothing.makespan, nothing.busy, nothing.num_ranks) == (0.0, (0.0, 0.0), 2)
    pipe.close()


@pytest.mark.parametrize("name", ["makespan", "busy", "step_bubble", "schedule", "num_ranks"])
def test_a_trace_used_as_a_timeline_still_works_and_says_what_to_write(name: str) -> None:
    pipe = Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=3, backend="serial")
    with pipe.trace() as trace:
        pipe.step(torch.randn(6, 4), torch.randn(6, 3))
    with pytest.warns(DeprecationWarning, match=rf"use trace\.timeline\.{name}"):
        found = getattr(trace, name)
    assert found == getattr(trace.timeline, name)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 5:
            raise RuntimeError("too large to bear")
        return x


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_layer_that_raises_is_named_with_rank_action_and_cause(backend: str) -> None:
    layers: list[nn.Module | Layer] = [nn.Identity(), nn.Identity()]
    layers += [Layer("blocks.7", Failing()), nn.Linear(4, 3)]
    pipe = Pipeline(layers, mse_loss, num_ranks=4, num_microbatches=4, backend=backend)
    x = torch.zeros(8, 4)
    x[5] = 9.0
    with pytest.raises(StageError) as error:
        pipe.step(x, torch.zeros(8, 3))
    lines = str(error.value).splitlines()
    assert lines[0] == "rank 2 failed in layer 'blocks.7' at 2F2 (forward, micro-batch 2)"
    assert lines[1] == "  RuntimeError: too large to bear"
    assert isinstance(error.value.__cause__, RuntimeError)
    pipe.step(x.clamp(max=1), torch.zeros(8, 3))  # and it goes on
    pipe.close()


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (torch.zeros(4, 4), torch.zeros(5, 3), "lengths along dim 0 are 4, 5"),
        (torch.zeros(0, 4), torch.zeros(0, 3), "the batch has no samples"),
        ({"y": torch.zeros(4, 4)}, torch.zeros(4, 3), "but layers read z before any layer writes"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(
    inputs: object, target: Tensor, message: str
) -> None:
    layers = LayerSequence(
        (Layer("a", nn.Linear(4, 3), ("z" if isinstance(inputs, dict) else "x",)),)
    )
    pipe = Pipeline(layers, mse_loss, num_ranks=1, num_microbatches=2)
    with pytest.raises(BatchError) as error:
        pipe.step(inputs, target)
    assert message in str(error.value)
    pipe.close()


def test_a_schedule_that_adds_gradients_in_another_order_is_refused() -> None:
    backwards = Schedule.from_text("0F0 0F1 0B1 0B0")
    with pytest.raises(
        ScheduleError, match=r"^0B1 comes before 0B0, but gradients are added in asc"
    ):
        Pipeline(chain(), mse_loss, num_ranks=1, num_microbatches=2, schedule=backwards)


def test_wrong_options_are_errors() -> None:
    with pytest.raises(ModelError, match="backend is 'gpu', but takes 'threads' or 'serial'"):
        Pipeline(chain(), mse_loss, num_ranks=1, num_microbatches=2, backend="gpu")
    with pytest.raises(ModelError, match="recompute is 'sometimes', but 2 stages take one of"):
        Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2, recompute="sometimes")
    one = Schedule.from_text("0F0 0B0")
    with pytest.raises(ScheduleError, match="the schedule is for 1 ranks and 1 micro-batches"):
        Pipeline(chain(), mse_loss, num_ranks=2, num_microbatches=2, schedule=one)


def random_and_normed() -> nn.Sequential:
    torch.manual_seed(4)
    middle = (nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_verify_finds_no_difference_and_leaves_the_model_as_it_was(schedule: str) -> None:
    model = random_and_normed()
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=3, schedule=schedule)
    x, y = torch.randn(9, 4), torch.randn(9, 3)
    pipe.step(x, y)
    state = copy.deepcopy(model.state_dict())
    before = [gradient.clone() for gradient in gradients(model)]
    pipe.verify(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    pipe.close()


class Counting(nn.Module):
    """Counts its calls in an object that is not examined, so that a recomputation counts too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = UserList[int]([0])

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.calls[-1] + 1)
        return x * self.calls[-1]


def test_verify_names_what_differs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, recompute="always")
    with pytest.raises(ParityError, match=r"^0\.weight \(stage 0\) differs from a plain loop"):
        pipe.verify(torch.randn(4, 4), torch.randn(4, 3))
    pipe.close()


class Popping(nn.Module):
    """Removes items from the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        popped: Tensor = self.linear(values.pop("a")) + values["b"]
        return popped


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"a": y, "b": 2 * y}


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [Named(), Popping(), nn.Linear(4, 3)],
        lambda: [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)],
        lambda: [Doubling(), nn.Linear(4, 4), nn.Linear(4, 3)],
        lambda: [nn.Linear(4, 4), nn.LSTM(4, 4), Layer("last", First())],
    ],
    ids=["a dict that is emptied", "relu in place", "the input in place", "lstm"],
)
def test_layers_that_change_what_they_are_given_have_the_bits_of_a_plain_loop(
    make: Callable[[], list[nn.Module | Layer]], recompute: str
) -> None:
    torch.manual_seed(6)
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    before = x.clone()
    pipe = Pipeline(
        make(), mse_loss, num_ranks=3, num_microbatches=3, schedule="zb_h1", recompute=recompute
    )
    pipe.verify(x.clone(), y)
    pipe.step(x, y)
    assert torch.equal(x, before)
    pipe.close()


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, values: tuple[Tensor, object]) -> Tensor:
        first: Tensor = self.linear(values[0])
        return first


def test_a_step_that_failed_leaves_nothing_in_the_next_gradient() -> None:
    embedding = nn.Linear(4, 4)
    head = nn.Linear(4, 4)
    head.weight = embedding.weight
    fails = [True]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails and target.sum() > 100:
            raise ValueError("no")
        return mse_loss(output, target)

    model = nn.Sequential(embedding, nn.Tanh(), head)
    pipe = Pipeline(model, loss_fn, num_ranks=3, num_microbatches=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    y[6] = 1000
    with pytest.raises(StageError, match="rank 2 failed in layer 'loss_fn' at 2F3"):
        pipe.step(x, y)
    fails.clear()
    model.zero_grad()
    pipe.step(x, y)
    after = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    fresh = Pipeline(model, loss_fn, num_ranks=1, num_microbatches=4)
    fresh.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(after, gradients(model), strict=True))
    pipe.close()
    fresh.close()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_without_a_message_ends_the_step_too() -> None:
    def loss_fn(*_: Tensor) -> Tensor:
        raise UnspeakableError

    pipe = Pipeline(chain(), loss_fn, num_ranks=2, num_microbatches=2)
    with pytest.raises(StageError, match=r"UnspeakableError: \(its text cannot be shown\)"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 3))
    pipe.close()


class Wrapped:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Wrap(nn.Module):
    def forward(self, x: Tensor) -> Wrapped:
        return Wrapped(x)


class Unwrap(nn.Module):
    def forward(self, wrapped: Wrapped) -> Tensor:
        return wrapped.tensor


def test_an_object_with_tensors_that_would_be_missed_is_refused_between_stages() -> None:
    layers = [nn.Linear(4, 3), Wrap(), Unwrap()]
    pipe = Pipeline(layers, mse_loss, num_ranks=3, num_microbatches=2)
    with pytest.raises(StageError, match="a Wrapped passes between stages, but tensors in it"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 3))
    pipe.close()


class Interrupting(nn.Module):
    """Raises KeyboardInterrupt, as Ctrl-C does while this layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_armed:
            self.is_armed = False
            os.kill(os.getpid(), signal.SIGINT)
        return x * 1.0


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_an_interrupt_reaches_the_caller_once_and_the_next_step_works(backend: str) -> None:
    interrupting = Interrupting()
    model = nn.Sequential(nn.Linear(4, 4), interrupting, nn.Linear(4, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=8, backend=backend)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    pipe.step(x, y)
    wanted = [gradient.clone() for gradient in gradients(model)]
    interrupting.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, y)
    model.zero_grad()
    pipe.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), wanted, strict=True))
    pipe.close()

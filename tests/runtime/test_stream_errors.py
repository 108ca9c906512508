"""Failures in streams, and errors for options that a stream cannot have."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from stageline.checkpoint.save import save
from stageline.errors import (
    BatchError,
    CheckpointError,
    ModelError,
    ScheduleError,
    StageError,
)
from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline
from stageline.runtime.backends.threads import ThreadsBackend
from stageline.schedules.build import build_schedule
from stageline.zoo.cases import grouped

BACKENDS = ("serial", "threads")
Batch = tuple[Tensor, Tensor]


def gradient_descent(weights: list[nn.Parameter]) -> Optimizer:
    return SGD(weights, 0.02, momentum=0.9)


def layers(*extra: nn.Module) -> LayerSequence:
    torch.manual_seed(1)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    return LayerSequence.of([*modules[:2], *extra, modules[2]])


def batches(count: int) -> list[Batch]:
    torch.manual_seed(2)
    return [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(count)]


@pytest.fixture
def build() -> Iterator[Callable[..., Pipeline]]:
    """Return a function that makes pipelines, by default PipeDream on three ranks."""
    built: list[Pipeline] = []

    def make(model: Any = None, **given: Any) -> Pipeline:
        defaults: dict[str, Any] = {"num_ranks": 3, "num_microbatches": 1}
        defaults |= {"schedule": "pipedream", "optimizer_fn": gradient_descent}
        built.append(Pipeline(model or layers(), mse_loss, **grouped(defaults | given)))
        return built[-1]

    yield make
    for pipe in built:
        pipe.close()


Build = Callable[..., Pipeline]


def weights_of(pipe: Pipeline) -> list[Tensor]:
    return [weight.detach().clone() for weight in pipe.parameters()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


# Layers, loaders and callers that fail


class Failing(nn.Module):
    """Raises in one of its calls, forward or backward."""

    def __init__(self, call: int, error: BaseException, *, backward: bool = False) -> None:
        super().__init__()
        self.calls, self.call, self.error, self.is_backward = 0, call, error, backward

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            if not self.is_backward:
                raise self.error
            x = x.clone()
            x.register_hook(self._fail)  # type: ignore[no-untyped-call]  # torch's own
        return x

    def _fail(self, _: Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("backward", "what"), [(False, "1F1 (forward"), (True, "1B1 (backward")])
def test_a_layer_that_raises_ends_the_stream_with_where_it_was(
    build: Build, backend: str, backward: bool, what: str
) -> None:
    """Its tenth forward is that of micro-batch 1 of mini-batch 4."""
    failing = Failing(10, ValueError("of the user's own"), backward=backward)
    pipe = build(layers(failing), balance=[1, 2, 1], num_microbatches=2, backend=backend)
    results: list[object] = []
    message = (
        f"rank 1 failed in layer '{'1 to 2' if backward else '2'}' at {what}, micro-batch 1 of "
        "mini-batch 4)\n  ValueError: of the user's own\n  stopped: rank 0 at "
    )
    with pytest.raises(StageError, match=f"^{re.escape(message)}") as caught:
        results.extend(pipe.run(batches(12)))
    assert 1 <= len(results) <= 4
    assert isinstance(caught.value.__cause__, ValueError)
    assert not pipe._session.is_streaming
    assert all(weight.grad is None for weight in pipe.parameters())
    # nothing is left behind that would disturb another stream
    assert len(list(pipe.run(batches(5)))) == 5
    assert pipe.eval()(batches(1)[0][0]).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_that_raises_ends_the_stream_with_where_it_was(
    build: Build, backend: str
) -> None:
    class Failing(SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]  # none is used
            if self.param_groups[0]["params"][0] is bad and not results:
                raise ValueError("of the user's own")
            super().step(closure)

    results: list[object] = []
    model = layers()
    bad = model.layers[2].module.weight
    pipe = build(model, optimizer_fn=lambda weights: Failing(weights, 0.1), backend=backend)
    message = r"^rank 2 failed in layer 'optimizer' at 2STEP \(optimizer step of mini-batch 0\)"
    with pytest.raises(StageError, match=message):
        results.extend(pipe.run(batches(6)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_raises_while_an_abandoned_stream_is_drained_is_reported(
    build: Build, backend: str
) -> None:
    failing = Failing(7, ValueError("too late"), backward=True)
    pipe = build(layers(failing), balance=[1, 2, 1], backend=backend)
    stream = pipe.run(batches(12))
    for _ in range(7 - pipe.ahead):
        next(stream)
    with pytest.raises(StageError, match=r"mini-batch 6\)\n  ValueError: too late"):
        stream.close()
    assert not pipe._session.is_streaming


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_layer_ends_a_serial_stream_at_once(
    build: Build, kind: type[BaseException]
) -> None:
    """Micro-batches in flight cannot be finished: other ranks would wait for this layer."""
    pipe = build(layers(Failing(5, kind())), backend="serial")
    with pytest.raises(kind):
        list(pipe.run(batches(12)))
    assert not pipe._session.is_streaming
    assert len(list(pipe.run(batches(5)))) == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_in_the_loader_drains_the_stream(build: Build, backend: str) -> None:
    def loader() -> Iterator[Batch]:
        yield from batches(5)
        raise KeyboardInterrupt

    pipe, other = build(backend=backend), build(backend=backend)
    with pytest.raises(KeyboardInterrupt):
        list(pipe.run(loader()))
    assert len(list(other.run(batches(5)))) == 5
    assert same(weights_of(pipe), weights_of(other))


def test_no_thread_of_a_rank_is_at_work_after_a_stream(build: Build) -> None:
    pipe = build(layers(Failing(4, ValueError("of the user's own"))), backend="threads")
    with pytest.raises(StageError):
        list(pipe.run(batches(9)))
    stream = pipe.run(batches(9))
    next(stream)
    stream.close()
    assert isinstance(pipe._session.backend, ThreadsBackend)
    ranks = list(pipe._session.backend.pool._threads)
    assert len(ranks) == 3
    pipe.close()
    assert not any(each.is_alive() for each in ranks)


def test_a_batch_that_does_not_fit_is_the_loaders_error_after_what_went_in_before(
    build: Build,
) -> None:
    data = batches(4)
    data.append((torch.randn(4, 4), torch.randn(3, 4)))
    pipe, other = build(), build()
    losses: list[float] = []
    with pytest.raises(ValueError, match="4"):
        losses.extend(float(result.loss) for result in pipe.run(data))
    assert losses == [float(result.loss) for result in other.run(data[:4])]
    assert same(weights_of(pipe), weights_of(other))


# Who may step, and when


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_an_optimizer_of_the_callers_own_is_refused(build: Build, schedule: str) -> None:
    pipe = build(schedule=schedule)
    outside = AdamW(pipe.parameters())
    message = (
        "AdamW.step() was called for weights that the pipeline steps itself, when their gradients "
        "are complete: omit it"
    )
    before = weights_of(pipe)
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        outside.step()
    for _ in pipe.run(batches(4)):
        with pytest.raises(ModelError, match=r"SGD.step\(\) was called for weights that the"):
            pipe.optimizers[0].step()
    assert not same(weights_of(pipe), before)
    elsewhere = SGD([nn.Parameter(torch.ones(1))], 0.1)
    elsewhere.step()
    pipe.close()
    outside.step()  # the weights are the caller's again


def test_a_callers_step_is_refused_while_the_rank_of_that_stage_steps(build: Build) -> None:
    """Ranks are threads: a step of the caller's must not pass for that of the rank."""
    started, refused = threading.Event(), threading.Event()

    class SlowStep(SGD):
        def step(self, *given: Any, **options: Any) -> Any:
            started.set()
            assert refused.wait(60)
            return super().step(*given, **options)

    def optimizer_fn(weights: list[nn.Parameter]) -> Optimizer:
        return SlowStep(weights, 0.02)

    pipe = build(optimizer_fn=optimizer_fn, num_ranks=1, backend="threads")
    outcomes: list[BaseException | None] = []

    def step_from_outside() -> None:
        assert started.wait(60)
        try:
            SGD.step(pipe.optimizers[0])  # type: ignore[arg-type]
        except ModelError as error:
            outcomes.append(error)
        finally:
            refused.set()

    caller = threading.Thread(target=step_from_outside)
    caller.start()
    assert len(list(pipe.run(batches(1)))) == 1
    caller.join(60)
    assert [str(error).split(" was called")[0] for error in outcomes] == ["SlowStep.step()"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_scheduler_of_the_callers_own_may_step_between_streams_and_not_in_one(
    build: Build, schedule: str, backend: str
) -> None:
    pipe, other = (build(schedule=schedule, backend=backend) for _ in range(2))
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in pipe.optimizers]
    for _ in range(2):
        assert len(list(pipe.run(batches(4)))) == 4
        for scheduler in schedulers:
            scheduler.step()
    message = (
        "lr was changed from 0.005 to 0.0025 on stage 1, in the middle of a stream in which every "
        "stage is at another step: give Pipeline a scheduler_fn=, which steps with each stage, or "
        "change it between two streams"
    )
    count = 0
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):  # noqa: PT012  a user's loop
        for _ in pipe.run(batches(9)):
            count += 1
            schedulers[1].step()
    assert count == 1
    assert [optimizer.param_groups[0]["lr"] for optimizer in pipe.optimizers] == [0.005] * 3
    # what was on its way was trained with the learning rate that it had, but for a step that
    # another thread may have been in the middle of
    for rate, size in ((0.02, 4), (0.01, 4), (0.005, 1 + pipe.ahead)):
        for optimizer in other.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        assert len(list(other.run(batches(size)))) == size
    assert backend == "threads" or same(weights_of(pipe), weights_of(other))


def test_the_caller_may_change_learning_rates_between_single_steps(build: Build) -> None:
    pipe = build(schedule="1f1b", scheduler_fn=lambda made: StepLR(made, 1, gamma=0.5))
    pipe.step(*batches(1)[0])
    pipe.optimizers[1].param_groups[0]["lr"] = 1.0
    pipe.step(*batches(1)[0])
    assert [made.param_groups[0]["lr"] for made in pipe.optimizers] == [0.005, 0.5, 0.005]


@pytest.mark.parametrize("scheduler", [None, lambda made: StepLR(made, 100)])
def test_a_learning_rate_that_is_changed_while_a_stage_steps_is_noticed_or_undone(
    build: Build, scheduler: Callable[[Optimizer], LRScheduler] | None
) -> None:
    pipe = build(scheduler_fn=scheduler, backend="serial")

    def meddle(optimizer: Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["lr"] = 7.0

    pipe.optimizers[1].register_step_post_hook(meddle)
    if scheduler is None:
        with pytest.raises(ModelError, match=r"^lr was changed from 0.02 to 7.0 on stage 1, in"):
            list(pipe.run(batches(8)))
    else:
        assert len(list(pipe.run(batches(8)))) == 8
    assert [optimizer.param_groups[0]["lr"] for optimizer in pipe.optimizers] == [0.02] * 3


def test_a_scheduler_that_runs_in_another_thread_is_no_external_change(build: Build) -> None:
    """The caller goes on while the scheduler of a stage has changed the rate, and not returned."""
    is_changed, may_return = threading.Event(), threading.Event()

    class Slow(StepLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 5:  # and so not when it is made
                is_changed.set()
                assert may_return.wait(10)

    def scheduler(optimizer: Optimizer) -> LRScheduler:
        kind = Slow if optimizer.param_groups[0]["params"][0].shape == (3, 4) else StepLR
        return kind(optimizer, 1, gamma=0.5)

    def loader() -> Iterator[Batch]:
        for number in range(9):
            if number == 5:
                may_return.set()
            yield torch.randn(4, 4), torch.randn(4, 3)

    model = LayerSequence.of([nn.Linear(4, 4), nn.Linear(4, 3)])
    pipe = build(model, num_ranks=2, scheduler_fn=scheduler, backend="threads")
    for number, _ in enumerate(pipe.run(loader())):
        if number == 2:  # mini-batch 4 is on its way
            assert is_changed.wait(30)
    assert pipe.num_steps == 9


# What asynchronous pipelines do not do


def test_methods_that_need_a_plain_step_are_refused_with_an_alternative(build: Build) -> None:
    pipe = build()
    x, y = batches(1)[0]
    message = (
        "step was called, but 'pipedream' has several mini-batches on their way at a time: use for "
        "result in pipe.run(loader)"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        pipe.step(x, y)
    message = (
        "the pipeline was called in training, but 'pipedream' needs its loss: use "
        "pipe.run(loader), or pipe.eval() for outputs"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        pipe(x)
    message = (
        "verify was called, but 'pipedream' does not give the numbers of a plain loop, by design: "
        "verify a synchronous schedule of the same model"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        pipe.verify(x, y)
    with torch.no_grad():
        assert pipe(x).shape == (4, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_one_thing_is_done_at_a_time(build: Build, backend: str) -> None:
    """With threads, a second thing would wait for those of the first for ever."""
    pipe = build(schedule="1f1b", num_microbatches=2, backend=backend)
    x, y = batches(1)[0]
    output = pipe(x)
    with pipe.trace() as trace:
        pass
    timeline = trace.timeline
    stream, second = pipe.run(batches(6)), pipe.run(batches(6))
    next(stream)
    message = (
        "^a stream of run is on its way, but only one thing can be done at a time: use up its "
        r"results, or close\(\) it$"
    )
    attempts: list[Callable[[], object]] = [
        lambda: pipe.run(batches(2)),
        lambda: next(second),
        lambda: pipe.step(x, y),
        lambda: pipe(x),
        lambda: pipe.verify(x, y),
        lambda: pipe.replan(pipe.optimizers[0], [timeline]),
        output.sum().backward,
    ]
    for attempt in attempts:
        with pytest.raises(ModelError, match=message):
            attempt()
    assert len(list(stream)) == 5
    assert len(list(pipe.run(batches(2)))) == 2


def test_gradients_that_are_left_are_not_mixed_into_a_stream(build: Build) -> None:
    pipe = build()
    next(pipe.parameters()).grad = torch.ones(4, 4)
    message = (
        "^some parameters have gradients, but a stream begins without any: call "
        r"pipe.zero_grad\(\) before run$"
    )
    before = [weight.grad for weight in pipe.parameters()]
    assert any(gradient is not None for gradient in before)
    with pytest.raises(ModelError, match=message):
        next(pipe.run(batches(4)))
    assert all(a is b.grad for a, b in zip(before, pipe.parameters(), strict=True))  # none is lost
    pipe.zero_grad()
    assert len(list(pipe.run(batches(4)))) == 4


def tied(*, frozen: bool = False) -> LayerSequence:
    model = layers()
    first, _, last = model.modules
    last.weight = first.weight.requires_grad_(not frozen)
    return LayerSequence.of(list(model.modules))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_weights_tied_across_stages_are_refused_where_stages_step_apart(
    build: Build, schedule: str
) -> None:
    message = (
        f"'0.weight' of stage 0 and '2.weight' of stage 1 are the same weight, but with "
        f"'{schedule}' each stage steps its own weights at its own time: put these layers into one "
        "stage with balance=, or use a synchronous schedule"
    )
    options = {"schedule": schedule, "num_ranks": 2, "num_microbatches": 2, "balance": [1, 2]}
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        build(tied(), **options)
    build(tied(frozen=True), **options)  # it has no versions
    build(tied(), **options | {"schedule": "1f1b"})
    build(tied(), **options | {"num_ranks": 1, "balance": [3]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"optimizer_fn": None},
            ModelError,
            (
                "'pipedream' steps the optimizer on its own, but has none: give it one with "
                "optimizer_fn=lambda params: SGD(params, lr=0.1)"
            ),
        ),
        (
            {"optimizer_fn": SGD([nn.Parameter(torch.ones(1))], 0.1)},
            ModelError,
            (
                "optimizer_fn is SGD(…), but has to be a function that makes one for each stage: "
                "optimizer_fn=lambda params: SGD(params, lr=0.1)"
            ),
        ),
        (
            {"optimizer_fn": lambda _: None},
            ModelError,
            (
                "optimizer_fn returned None for the parameters of a stage, but has to return an "
                "optimizer: optimizer_fn=lambda params: SGD(params, lr=0.1)"
            ),
        ),
        (
            {"scheduler_fn": StepLR(SGD([nn.Parameter(torch.ones(1))], 0.1), 1)},
            ModelError,
            (
                "scheduler_fn is StepLR(…), but has to be a function that makes one for each "
                "stage: scheduler_fn=lambda optimizer: StepLR(optimizer, 100)"
            ),
        ),
        (
            {
                "schedule": "1f1b",
                "optimizer_fn": None,
                "scheduler_fn": lambda made: StepLR(made, 1),
            },
            ModelError,
            "scheduler_fn was given without optimizer_fn, which it is for: give both",
        ),
        (
            {"max_norm": 1.0},
            ModelError,
            (
                "max_norm was given, but with 'pipedream' there is no moment at which the norm of "
                "all gradients is known: omit it, or use a synchronous schedule"
            ),
        ),
        (
            {"schedule": "pipedream_2bw", "num_microbatches": 2},
            ScheduleError,
            (
                "num_microbatches is 2, but 'pipedream_2bw' on 3 ranks needs at least 3 so that "
                "two weight versions suffice: use more, or 'pipedream'"
            ),
        ),
        (
            {"replicas": [2, 1], "num_microbatches": 2},
            ModelError,
            (
                "replicas is [2, 1], but a stage on several ranks needs a process for each: start "
                "the script with stageline run --num-processes 3"
            ),
        ),
        (
            {"replicas": [2, 1], "num_microbatches": 3},
            ScheduleError,
            (
                "num_microbatches is 3, but a stage on 2 ranks needs a multiple of 2: use one, or "
                "other replicas"
            ),
        ),
        (
            {"replicas": [2, 2], "num_microbatches": 2},
            ScheduleError,
            (
                "replicas is [2, 2], but must be one positive integer for each stage, with sum 3, "
                "the number of ranks"
            ),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    build: Build, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build(**options)


def test_options_of_a_schedule_that_is_built_already_are_refused(build: Build) -> None:
    schedule = build_schedule("pipedream", num_ranks=3, num_microbatches=1)
    with (
        pytest.warns(DeprecationWarning, match=r"write schedule=sl\.build_schedule"),
        pytest.raises(
            ModelError, match=r"^vertical_sync was given beside a schedule that is built"
        ),
    ):
        Pipeline(
            layers(),
            mse_loss,
            num_ranks=3,
            num_microbatches=1,
            schedule=schedule,
            vertical_sync=True,
        )  # type: ignore[call-arg]
    assert len(list(build(schedule=schedule).run(batches(4)))) == 4


def test_run_needs_an_optimizer_of_the_pipelines_own(build: Build) -> None:
    pipe = build(schedule="1f1b", optimizer_fn=None)
    message = (
        "run was called, but the optimizer is not the pipeline's: give it one with "
        "optimizer_fn=lambda params: SGD(params, lr=0.1), or use step"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        pipe.run(batches(2))


def test_layers_do_not_move_between_stages_that_have_optimizers_of_their_own(build: Build) -> None:
    with pytest.raises(ModelError, match="replan was called, but the pipeline has an optimizer"):
        build().replan(None, [])


def test_a_loader_gives_pairs(build: Build) -> None:
    with pytest.raises(BatchError, match="the loader gave a Tensor, but a batch is a pair"):
        list(build().run([torch.ones(4, 4)]))  # type: ignore[list-item]


def test_gradients_of_inputs_are_not_lost_silently(build: Build) -> None:
    inputs = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(BatchError, match="inputs require gradients, but a stream passes none back"):
        list(build().run([(inputs, torch.ones(4, 4))]))


def test_nothing_is_saved_while_stages_are_at_different_steps(build: Build, tmp_path: Path) -> None:
    pipe = build()
    results = pipe.run(batches(8))
    next(results)
    with pytest.raises(CheckpointError, match="stages are at different steps"):
        save(tmp_path, pipe, step=1)
    assert len(list(results)) == 7
    save(tmp_path, pipe, step=8)

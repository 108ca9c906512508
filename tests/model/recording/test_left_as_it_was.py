"""A model is after a recording what it was before."""

from __future__ import annotations

import copy
import pickle
import random
from threading import Event, Thread
from typing import Any

import torch
from tests.model.recording.parity import Block, Model, assert_equal, batch, opened
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stageline.model.recording.recorded_model import record_model


class Everything(Model):
    """State of all kinds, and code that changes it in a recording."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.head)
        self.blocks[1].twin = self.blocks[1].linear
        self.norm = nn.BatchNorm1d(5)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_forward_hook(hook)

    def block(self) -> nn.Module:
        return Remembers()

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        x = self.embed(self.norm(x.flatten(0, 1)).view_as(x))
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.lstm(x)[0], self.head.weight)


class Remembers(Block):
    seen: Any = None

    def forward(self, x: Tensor) -> Any:
        self.seen = x.mean()
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x) + random.random() * 0


def hook(_: nn.Module, __: Any, output: Any) -> Any:
    return output * 1.0


def contents(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        tables = [module._parameters, module._buffers]
        tensors = [
            (key, id(t), None if t is None else t.clone()) for d in tables for key, t in d.items()
        ]
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks)]
        own = {k: id(v) for k, v in vars(module).items()}
        found.append((name, type(module), own, hooks, list(module._modules), tensors))
    return found


def are_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        first[:5] == second[:5]
        and all(
            a[:2] == b[:2] and (a[2] is None or torch.equal(a[2], b[2]))
            for a, b in zip(first[5], second[5], strict=True)
        )
        for first, second in zip(before, after, strict=True)
    )


def test_nothing_of_a_model_or_of_random_states_has_changed() -> None:
    model, inputs = Everything(), batch()[0]
    before, given = contents(model), inputs.clone()
    states = torch.get_rng_state(), random.getstate()
    with opened(model, inputs):
        assert are_same(before, contents(model))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(inputs, given)


def test_a_recorded_model_is_copied_and_pickled_as_before() -> None:
    model, inputs = Model(), batch()[0]
    record_model(model, inputs, {})
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is Model
        assert [type(block) for block in made.blocks] == [Block] * 3
        assert torch.equal(made.eval()(inputs), model.eval()(inputs))
        model.train()


def test_two_pipelines_of_one_model_add_the_same_gradients() -> None:
    model, given = Model(), batch()
    other = copy.deepcopy(model)
    with opened(model, given[0]) as first, opened(model, given[0]) as second:
        float(first.step(*given).loss)
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        float(second.step(*given).loss)
    for name, parameter in other.named_parameters():
        parameter.grad = expected[name]
    assert_equal(model, other)


def test_another_thread_may_run_a_model_meanwhile() -> None:
    model, other, inputs = Model(), Model(), batch()[0]
    stop, results = Event(), [other.eval()(inputs)]

    def run() -> None:
        while not stop.is_set():
            results.append(other(inputs))

    thread = Thread(target=run)
    thread.start()
    try:
        tapes = [record_model(model, inputs, {}).tapes[0] for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert len({len(cut.tape.operations) for cut in tapes}) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_table_that_the_first_call_makes_stays() -> None:
    class Table(Model):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            if self.table is None:
                self.table = torch.arange(5.0)
            return super().forward(x + self.table)

    model = Table()
    record_model(model, batch()[0], {})
    assert model.table is not None
    assert torch.equal(model.table, torch.arange(5.0))

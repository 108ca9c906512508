"""Models as people write them: notes in attributes, packed sequences, weights that are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.model.recording.parity import (
    WIDTH,
    Block,
    Model,
    assert_parity,
    batch,
    opened,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stageline as sl
from stageline.errors import ModelError
from stageline.model.own_loss import own_loss
from stageline.model.recording.call_arguments import call_arguments
from stageline.model.recording.recorded_model import record_model


class Context(Model):
    """One method sets an attribute that another one reads."""

    context: Any = None

    def prepare(self, x: Tensor) -> None:
        self.context = torch.tanh(x).mean(dim=1, keepdim=True)

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        self.prepare(x)
        result: Tensor = block(x) * self.context
        return result


class Features(Model):
    """A list has what all blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.features.clear()
        super().forward(x)
        return self.head(torch.stack(self.features).mean(dim=0))

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = block(x)
        self.features.append(result)
        return result


class AddedUp(Model):
    """A penalty of all blocks, which a loss outside could ask for as well."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        self.penalty = 0.0
        return super().forward(x) + self.penalty

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = block(x)
        self.penalty = self.penalty + result.square().mean()
        return result


@pytest.mark.parametrize("kind", [Context, Features, AddedUp])
def test_a_forward_may_keep_notes_in_attributes(kind: type[Model]) -> None:
    assert len(assert_parity(kind)) >= 4


def test_a_loss_outside_does_not_get_an_old_note() -> None:
    model = AddedUp()
    record_model(model, batch()[0], {})
    for term in (1.0, torch.zeros(1)):
        with pytest.raises(ModelError, match=r"'AddedUp.penalty' is set by the forward.*return"):
            term + model.penalty
    assert model(batch()[0]).shape == (5, 4, 3)  # which sets it


class Remembers(Model):
    """Reads what the last forward has left."""

    memory: Any = None

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if self.memory is not None:
            x = x + self.memory
        self.memory = x.detach().mean()
        return self.head(x)


class Once(Model):
    """Computes with weights in its first forward, and keeps that."""

    table: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = self.embed.weight.sum()
        return super().forward(x) * self.table


@pytest.mark.parametrize(("kind", "name"), [(Remembers, "memory"), (Once, "table")])
def test_what_the_last_forward_left_may_not_be_read(kind: type[Model], name: str) -> None:
    with pytest.raises(ModelError, match=f"sets '{kind.__name__}.{name}' anew each time"):
        opened(kind(), batch()[0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(torch.tanh(self.hidden(padded.sum(dim=1))))


def test_packed_sequences_have_other_lengths_in_each_micro_batch() -> None:
    ids = torch.arange(30).view(5, 6) % 9
    batches = [
        ({"ids": ids, "lengths": torch.tensor(lengths)}, torch.zeros(5, 3))
        for lengths in ([6, 2, 3, 4, 1], [3, 3, 5, 2, 2])
    ]
    assert assert_parity(Packed, batches=batches) == ["embed", "rnn", "hidden", "head"]


class Hyper(Model):
    """The weights of a block's layer are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, WIDTH * WIDTH)
        self.code = nn.Parameter(torch.randn(4))
        self.target = nn.Linear(WIDTH, WIDTH, bias=False)

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        weights = {"weight": self.make(self.code).view(WIDTH, WIDTH)}
        result: Tensor = torch.func.functional_call(self.target, weights, (block(x),))
        return result


class Cache:
    """An object that modules fill, which torch knows nothing of."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class CachingBlock(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
        assert cache is not None
        cache.items.append(super().forward(x))
        return torch.stack(cache.items).sum(dim=0)


class Caches(Model):
    def block(self) -> nn.Module:
        return CachingBlock()

    def forward(self, x: Tensor) -> Any:
        x, cache = self.embed(x), Cache()
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


@pytest.mark.parametrize("kind", [Hyper, Caches])
def test_modules_are_opened_where_tensors_cannot_be_followed_into_them(kind: type[Model]) -> None:
    assert len(assert_parity(kind)) >= 5


def test_an_object_is_refused_if_its_module_has_to_stay_in_one_piece() -> None:
    with pytest.raises(ModelError, match=r"blocks.0 is called with a Cache, in which tensors"):
        record_model(Caches(), batch()[0], {}, opaque=["blocks.0"])


class SharedPart(Model):
    """A block has a module in it that the model calls by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[0]
        self.shared: nn.Module = first.norm

    def apply_block(self, x: Tensor, block: Any) -> Tensor:
        result: Tensor = self.shared(block(x))
        return result


class UsesWeights(Model):
    """The model's own code uses the weight of a module that it has called."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x) + functional.linear(x.flip(1), self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [SharedPart, UsesWeights])
def test_weights_with_several_uses_are_verified(kind: type[Model]) -> None:
    assert_parity(kind)
    inputs, target = batch()
    with opened(kind(), inputs) as pipe:
        pipe.verify(inputs, target)


class InModule(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


class WithLoss(Model):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = InModule()

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = super().forward(x)
        return logits, self.criterion(logits, labels)


def test_targets_are_counted_that_a_loss_in_a_module_counts() -> None:
    labels = torch.ones(5, 4, dtype=torch.long)
    labels[0] = 0
    given = {"x": batch()[0], "labels": labels}
    with opened(WithLoss(), given, loss_fn=None) as pipe:
        weights = [weight for _, weight in pipe.step(given).losses]
    assert weights == [8 / 16, 8 / 16]


def test_a_loss_may_be_the_second_of_a_pair() -> None:
    loss, logits = torch.tensor(2.0), torch.zeros(2, 3)
    assert own_loss((logits, loss)) is loss
    assert own_loss((loss, logits, torch.tensor(1.0))) is loss
    with pytest.raises(ModelError, match="in which there is no loss"):
        own_loss((logits, loss, loss))


def test_a_cache_is_switched_off_where_the_forward_passes_its_arguments_on() -> None:
    model = WithLoss()
    assert call_arguments(model, {"x": 1}, {})[1] == {"x": 1}
    model.config = type("Config", (), {"use_cache": True})()
    assert call_arguments(model, {"x": 1}, {})[1] == {"x": 1, "use_cache": False}
    assert call_arguments(model, {"x": 1, "use_cache": True}, {})[1]["use_cache"]


def test_a_graph_that_the_forward_differentiates_is_not_cut() -> None:
    class Forces(Model):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.blocks[0](self.embed(x))
                (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            for block in self.blocks[1:]:
                y = block(y)
            return self.head(y) + force.square().mean()

    assert assert_parity(Forces) == ["embed", "blocks.1", "blocks.2", "head"]


class DroppedEmbedding(nn.Module):
    """Dropout between two layers, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(9, 4), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.drop(self.embed(ids) + 1.0)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("first", [True, False])
def test_a_model_with_dropout_between_layers_trains_and_evaluates(first: bool) -> None:
    ids = torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(0))
    target = torch.zeros(8, 3, 4)
    model = DroppedEmbedding().train(first)
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "balance": [1, 3]}
    with sl.Pipeline(
        model, nn.functional.mse_loss, example_inputs=ids, backend="serial", **sizes
    ) as pipe:
        for mode in (first, not first):
            pipe.train(mode).verify(ids, target)

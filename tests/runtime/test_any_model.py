"""Pipelines of modules that are no sequence of layers: their forward is recorded."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.errors import BatchError, ModelError, StageError
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.planning.profiling.profile import profile

IGNORED = -100


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Language(nn.Module):
    """A model as people have it: a mask, a token at the root, tied weights, its own loss."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width))
        self.embed = nn.Embedding(16, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.drop(self.embed(ids) + self.start)
        if mask is not None and not bool(mask.all()):
            x = x * mask[..., None]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
            )
        return Output(loss, logits)


def batch(num_samples: int = 8, length: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(num_samples + length)
    ids = torch.randint(0, 16, (num_samples, length))
    return {"ids": ids, "mask": torch.ones_like(ids), "labels": ids.clone()}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_module_trains_as_it_is_in_every_schedule(schedule: str, backend: str) -> None:
    torch.manual_seed(0)
    model, given = Language(), batch()
    sizes = {"num_ranks": 2, "num_microbatches": 4}
    with Pipeline(
        model,
        example_inputs=given,
        schedule=schedule,
        backend=backend,
        recompute="always" if schedule == "gpipe" else "never",
        **sizes,  # type: ignore[arg-type]
    ) as pipe:
        for other in (given, batch(7), batch(3, length=9)):
            pipe.verify(other)
        assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert pipe.state_dict().keys() == model.state_dict().keys()


def test_without_example_inputs_the_first_step_records() -> None:
    torch.manual_seed(0)
    model = Language()
    reference = copy.deepcopy(model)
    given = batch()
    with Pipeline(model, num_ranks=2, num_microbatches=4) as pipe:
        assert "after the first batch" in str(pipe)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        with pytest.raises(ModelError, match="give Pipeline example_inputs="):
            pipe.state_dict()
        pipe.step(given)
        optimizer.step()
    with Pipeline(reference, example_inputs=given, num_ranks=2, num_microbatches=4) as pipe:
        pipe.step(**given)
        torch.optim.SGD(pipe.parameters(), 0.1).step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_uneven_padding_gives_the_loss_and_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = without_dropout(Language().double())
    given = batch()
    given["labels"][:2] = IGNORED  # the first micro-batch counts nothing
    given["labels"][3, 1:] = IGNORED
    whole = copy.deepcopy(model)
    loss = whole(**given).loss
    loss.backward()
    with Pipeline(model, num_ranks=2, num_microbatches=4) as pipe:
        assert float(pipe.step(given).loss) == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients(model).items():
            expected = whole.get_parameter(name).grad
            assert (gradient is None) == (expected is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_loss_that_is_a_sum_is_not_divided() -> None:
    class Summed(Language):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(ids).logits.flatten(0, 1)
            return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 40

    torch.manual_seed(0)
    model = without_dropout(Summed())
    given = batch()
    del given["mask"]
    expected = model(**given)
    with Pipeline(model, num_ranks=2, num_microbatches=4) as pipe:
        assert float(pipe.step(given).loss) == pytest.approx(expected.item(), rel=1e-6)


def test_a_mask_may_send_micro_batches_along_different_ways() -> None:
    torch.manual_seed(0)
    model, given = Language(), batch()
    given["mask"][0, 2:] = 0  # only in the first micro-batch
    with Pipeline(model, example_inputs=batch(), num_ranks=2, num_microbatches=4) as pipe:
        pipe.verify(given)
        pipe.verify(batch())


def test_outputs_and_losses_of_a_call_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = without_dropout(Language())
    given = batch()
    given["labels"][0, 1:] = IGNORED
    reference = copy.deepcopy(model)
    expected = reference(**given)
    expected.loss.backward()
    with Pipeline(model, example_inputs=given, num_ranks=2, num_microbatches=4) as pipe:
        found = pipe(given)
        assert isinstance(found, Output)
        assert found.loss is not None
        torch.testing.assert_close(found.loss, expected.loss)
        found.loss.backward()  # type: ignore[no-untyped-call]
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad)
        pipe.eval()
        with torch.no_grad():
            plain = model(given["ids"]).logits
            assert torch.equal(pipe(given["ids"]).logits, plain)
            assert pipe({"ids": given["ids"]}).loss is None


def test_a_loss_outside_of_the_model() -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            y: Tensor = self.second(functional.relu(self.first(x)))
            return y * scale

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with Pipeline(Net(), functional.mse_loss, num_ranks=2, num_microbatches=4) as pipe:
        pipe.verify(x, y)
        pipe.verify({"x": x, "scale": 2.0}, y)
        pipe.verify((x, 0.5), y)
        pipe.verify(x, y, scale=3.0)


def test_stages_begin_where_the_user_says() -> None:
    model = Language(depth=6)
    options: dict[str, Any] = {"example_inputs": batch(), "num_microbatches": 2}
    with Pipeline(model, num_ranks=2, cut_at=["blocks.1"], **options) as pipe:  # type: ignore[call-arg]
        assert pipe.layers.layers[pipe.balance[0]].name == "blocks.1"
        text = str(pipe)
    assert "Language: 8 layers in 2 stages on 2 ranks, 1f1b, 2 micro-batches" in text
    assert "cut at blocks.1" in text
    assert "float32[4, 5, 8], 640B, to stage 1" in text
    with pytest.raises(ModelError, match=r"cut_at has 'blocks\.9', but a stage can begin at one"):
        Pipeline(model, num_ranks=2, options=Options(cut_at=["blocks.9"]), **options)
    with pytest.raises(ModelError, match=r"opaque has 'block', but the model has no module of"):
        Pipeline(model, num_ranks=2, options=Options(opaque=["block"]), **options)
    with pytest.raises(ModelError, match="balance and cut_at were both given"):
        Pipeline(
            model, num_ranks=2, balance=[4, 4], options=Options(cut_at=["blocks.1"]), **options
        )


def test_blocks_are_cut_further_if_there_are_more_stages_than_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(torch.relu(self.a(x)))
            return x + y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    x = torch.randn(4, 4)
    with Pipeline(
        Net(), functional.mse_loss, example_inputs=x, num_ranks=4, num_microbatches=2
    ) as pipe:
        names = [layer.name for layer in pipe.layers]
        assert names == ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"]
        pipe.verify(x, x)


def test_a_batch_that_does_not_fit_the_forward_is_refused() -> None:
    with Pipeline(Language(), num_ranks=2, num_microbatches=2) as pipe:
        with pytest.raises(BatchError, match=r"the batch does not fit Language\.forward.*'tokens'"):
            pipe.step({"ids": torch.zeros(2, 3, dtype=torch.long), "tokens": 1})
        with pytest.raises(StageError, match="in which there is no loss, and there is no loss_fn"):
            pipe.step(torch.zeros(2, 3, dtype=torch.long))


def test_a_model_on_meta_is_recorded_cut_and_filled() -> None:
    with torch.device("meta"):
        model = Language()
    given = batch()

    def fill(layer: Any) -> None:
        for parameter in layer.module.parameters():
            nn.init.normal_(parameter)

    with Pipeline(
        model, example_inputs=given, num_ranks=2, num_microbatches=2, init_fn=fill
    ) as pipe:
        pipe.verify(given)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight


def test_a_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, given = Language(), batch()
    before = copy.deepcopy(model)
    generator = torch.get_rng_state()
    with Pipeline(model, example_inputs=given, num_ranks=2, num_microbatches=2):
        pass
    assert torch.equal(torch.get_rng_state(), generator)
    for (name, found), (_, expected) in zip(
        model.named_modules(), before.named_modules(), strict=True
    ):
        assert type(found) is type(expected), name
        assert vars(found).keys() == vars(expected).keys(), name
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    copy.deepcopy(model)(**given)


def test_a_recorded_model_is_profiled_by_layer() -> None:
    found = profile(Language(), batch(), repeats=1, sizes=[1, 2])
    assert found.names == ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    assert found.at(2).layers[0].parameters == 16 * 8 * 4 + 8 * 4

"""The examples for other training loops give the numbers of plain loops, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.utils.data import default_collate

import stageline as sl


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_loop(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
) -> list[float]:
    """Train on four equal micro-batches of each batch, and return the losses."""
    losses = []
    for batch in batches:
        own = [loss_of(part) for part in quarters(batch)]
        for loss in own:
            (loss * 0.25).backward()  # type: ignore[no-untyped-call]  # it has none
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack([loss.detach() * 0.25 for loss in own]).sum()))
    return losses


def quarters(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        parts = [tensor.chunk(4) for tensor in batch.values()]
        return [dict(zip(batch, each, strict=True)) for each in zip(*parts, strict=True)]
    return list(zip(*(tensor.chunk(4) for tensor in batch), strict=True))


def test_bare_loop_has_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from examples import bare_loop  # noqa: PLC0415

    found = bare_loop.train(folder=tmp_path, show=False)
    model = bare_loop.language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / bare_loop.WARMUP))
    batches = islice(bare_loop.batches(), 1, 7)
    wanted = plain_loop(model, batches, lambda part: model(**part).loss, optimizer, scheduler)
    assert found == wanted
    batch = next(bare_loop.batches())
    with sl.Pipeline(model, example_inputs=batch, num_ranks=4, num_microbatches=2) as pipe:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sl.load(tmp_path, pipe)  # the same weights
        assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


def test_bare_loop_resumes_with_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from examples import bare_loop  # noqa: PLC0415

    first = bare_loop.train(num_ranks=2, steps=3, folder=tmp_path, show=False)
    second = bare_loop.train(num_ranks=3, steps=5, folder=tmp_path, show=False)
    assert first + second == bare_loop.train(num_ranks=1, steps=5, show=False)


def test_trainer_has_the_losses_norms_and_weights_of_a_plain_trainer(tmp_path: Path) -> None:
    """Of one whose batches are the micro-batches, and which accumulates their gradients."""
    transformers = pytest.importorskip("transformers")
    from examples import transformers_trainer  # noqa: PLC0415

    found = transformers_trainer.train(2, tmp_path / "pipeline")
    data = transformers_trainer.samples()
    plain = transformers.Trainer(
        transformers_trainer.language_model(),
        transformers_trainer.arguments(
            tmp_path / "plain", per_device_train_batch_size=2, gradient_accumulation_steps=4
        ),
        train_dataset=data[8:],
        eval_dataset=data[:8],
    )
    plain.train()
    wanted = plain.state.log_history
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [each[key] for each in found if key in each] == [
            each[key] for each in wanted if key in each
        ]
    # a batch of eight is evaluated in pieces of two here, and at once there
    losses = [[each["eval_loss"] for each in log if "eval_loss" in each] for log in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "pipeline" / "model")
    assert all(map(torch.equal, saved.parameters(), plain.model.parameters()))


def test_lightning_module_has_the_losses_of_a_plain_loop() -> None:
    pytest.importorskip("lightning")
    from examples import lightning_module  # noqa: PLC0415

    found = lightning_module.train(2, None)
    model = lightning_module.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=8)
    batches = [*lightning_module.loader(0, 128)] * 2

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(part[0]), part[1])

    assert found == plain_loop(model, batches, loss_of, optimizer, scheduler)


def test_accelerate_loop_has_the_losses_of_a_plain_loop() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples import accelerate_loop  # noqa: PLC0415

    found = accelerate_loop.train(2)
    model = accelerate_loop.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / accelerate_loop.WARMUP))
    data = accelerate_loop.samples()
    batches = [default_collate(data[first : first + 8]) for first in range(0, len(data), 8)]
    wanted = plain_loop(model, batches, lambda part: model(**part).loss, optimizer, scheduler)
    assert found == wanted

"""`PipelineModule`: checkpoints of Lightning's own, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stageline as sl

lightning = pytest.importorskip("lightning")

from stageline.integrations.lightning import PipelineModule  # noqa: E402


class Regression(PipelineModule):
    def training_step(self, batch: Tensor, _: int) -> None:
        optimizer: Any = self.optimizers()
        self.pipe.step(batch, batch.sum(dim=1, keepdim=True))
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Tensor, _: int) -> None:
        assert not self.pipe(batch).requires_grad

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)


def module() -> Regression:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
    loss = nn.functional.mse_loss
    return Regression(sl.Pipeline(model, loss, num_ranks=2, num_microbatches=2))


def fit(module: Regression, folder: Path, epochs: int, **others: Any) -> Any:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader: DataLoader[Tensor] = DataLoader(inputs, batch_size=8)  # type: ignore[arg-type]  # a tensor
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader, **others)
    return trainer


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")  # it does
def test_a_checkpoint_of_lightnings_resumes_with_the_same_bits_and_dropout(tmp_path: Path) -> None:
    undisturbed, first, resumed = module(), module(), module()
    fit(undisturbed, tmp_path / "undisturbed", 2)
    path = fit(first, tmp_path / "first", 1).checkpoint_callback.best_model_path
    fit(resumed, tmp_path / "first", 2, ckpt_path=path)
    assert resumed.pipe.num_steps == undisturbed.pipe.num_steps == 8
    assert all(map(torch.equal, undisturbed.parameters(), resumed.parameters()))


def test_the_pipeline_changes_its_mode_with_the_module() -> None:
    made = module()
    made.eval()
    assert not any(layer.module.training for layer in made.pipe.layers)
    made.train()
    assert all(layer.module.training for layer in made.pipe.layers)

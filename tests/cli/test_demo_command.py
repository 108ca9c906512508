"""`stageline demo`: the whole command, and its parts."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.invoke import invoke
from torch import Tensor

from stageline.cli.demo import training
from stageline.costs import Costs
from stageline.schedules.build import build_schedule
from stageline.simulation.median_costs import median_costs
from stageline.simulation.simulate import simulate
from stageline.zoo.text import batch


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate a short sample."""
    monkeypatch.setattr(training, "SAMPLE_LENGTH", 20)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_median_costs_of_timelines_predict_the_median_timeline(schedule: str) -> None:
    built = build_schedule(schedule, num_ranks=2, num_microbatches=4)
    timelines = [
        simulate(built, Costs(forward=[1.0 * slow, 2.0], input_grad=3.0, weight_grad=3.0 * slow))
        for slow in (5.0, 1.0, 1.1)
    ]
    predicted = simulate(built, median_costs(timelines))
    assert predicted.makespan == pytest.approx(timelines[2].makespan)


@pytest.mark.usefixtures("short")
def test_the_exported_weights_generate_the_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.run(tmp_path, steps=2, num_ranks=4, schedule="1f1b")
    layers = training.model()
    state, learned = layers.state_dict(), load_file(tmp_path / "gpt.safetensors")
    assert learned.keys() == state.keys()
    assert not any(torch.equal(state[name], tensor) for name, tensor in learned.items())
    for name, tensor in learned.items():
        state[name].copy_(tensor)
    layers.modules.eval()
    generated = "def " + "".join(training.sample(layers))
    assert generated == (tmp_path / "sample.txt").read_text()
    assert generated in capsys.readouterr().out


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.usefixtures("short")
def test_ctrl_c_ends_the_training_and_continues_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(text: Tensor, step: int, *, size: int, context: int) -> tuple[Tensor, Tensor]:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return batch(text, step, size=size, context=context)

    monkeypatch.setattr(training, "batch", interrupted)
    num_threads = torch.get_num_threads()
    files = training.run(tmp_path, steps=1000, num_ranks=2, schedule="gpipe")
    assert "at step 1, " in (out := capsys.readouterr().out)
    assert "at step 2\n" in out
    assert all(path.stat().st_size for path in files)
    assert torch.get_num_threads() == num_threads


def test_the_demo_trains_verifies_draws_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "demo"
    code, out, err = invoke(capsys, "demo", str(folder), "--steps", "2", "--schedule", "zb_h1")
    assert code == 0
    assert (
        "parity: 8 losses, 43 gradients and 4 buffers are bit-identical to those of a plain" in out
    )
    assert "zb_h1, predicted in ms" in out
    assert "zb_h1, measured in ms" in out
    names = ["demo.svg", "gpt.safetensors", "sample.txt"]
    assert err.splitlines() == [f"wrote {folder / name}" for name in names]
    titles = re.findall(r'class="title"[^>]*>([^<]*)', (folder / "demo.svg").read_text())
    assert titles == ["zb_h1, predicted in ms", "zb_h1, measured in ms"]
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in out

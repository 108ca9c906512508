"""The demo's own pieces; the whole is run in test_cli.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stageline import demo
from stageline.costs import Costs
from stageline.planning.explain import median_costs
from stageline.schedules.build import build_schedule
from stageline.simulation.simulate import simulate
from stageline.zoo.text import batch


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample soon written."""
    monkeypatch.setattr(demo, "LENGTH", 20)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_medians_of_timelines_predict_the_timeline_in_the_middle(schedule: str) -> None:
    built = build_schedule(schedule, num_ranks=2, num_microbatches=4)
    timelines = [
        simulate(built, Costs(forward=[1.0 * slow, 2.0], input_grad=3.0, weight_grad=3.0 * slow))
        for slow in (5.0, 1.0, 1.1)
    ]
    predicted = simulate(built, median_costs(timelines))
    assert predicted.makespan == pytest.approx(timelines[2].makespan)


@pytest.mark.usefixtures("short")
def test_what_the_checkpoint_holds_writes_the_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.run(tmp_path, steps=2, ranks=4, schedule="1f1b")
    layers = demo.model()
    state, learned = layers.state_dict(), load_file(tmp_path / "gpt.safetensors")
    assert learned.keys() == state.keys()
    assert not any(torch.equal(state[name], tensor) for name, tensor in learned.items())
    for name, tensor in learned.items():
        state[name].copy_(tensor)
    layers.modules.eval()
    written = "def " + "".join(demo.sample(layers))
    assert written == (tmp_path / "sample.txt").read_text()
    assert written in capsys.readouterr().out


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.usefixtures("short")
def test_ctrl_c_ends_the_training_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(text: Tensor, step: int, *, size: int, context: int) -> tuple[Tensor, Tensor]:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return batch(text, step, size=size, context=context)

    monkeypatch.setattr(demo, "batch", interrupted)
    num_threads = torch.get_num_threads()
    files = demo.run(tmp_path, steps=1000, ranks=2, schedule="gpipe")
    assert "at step 1, " in (out := capsys.readouterr().out)
    assert "at step 2\n" in out
    assert all(path.stat().st_size for path in files)
    assert torch.get_num_threads() == num_threads

"""Inside a step Stageline never makes the host wait for a device, but for what is in one list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.accelerators.watched import batches, chain, watched
from torch import Tensor, nn

import stageline
from stageline.errors import HostWaitError
from stageline.pipeline import session_of
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.accelerators.code_places import RUNTIME
from stageline.runtime.accelerators.host_waits import HostRead, read_on_host
from stageline.runtime.devices import accelerators_of

WAITS = (
    "x.sum().item()",
    "float(x.sum())",
    "bool(x.sum() > 0)",
    "int(x.sum())",
    "[1, 2][x.sum().long() > 100]",
    "torch.equal(x, x)",
    "torch.allclose(x, x)",
    "x.nonzero()",
    "x[x > 0]",
    "torch.masked_select(x, x > 0)",
    "torch.unique(x)",
    "x.tolist()",
    "x.cpu()",
    "x.to('cpu')",
    "x.numpy()",
)


@pytest.fixture
def device() -> Iterator[Accelerator]:
    """A rank is inside a step."""
    (accelerator,) = accelerators_of([None], simulated=True)
    assert accelerator is not None
    stream = accelerator.new_stream("compute")
    with accelerator.rank_thread(lambda: (0, "0F0")), accelerator.queueing_on(stream):
        yield accelerator


def run(code: str, file: str) -> Any:
    """Run an expression as if it stood in a file."""
    return eval(compile(code, file, "eval"), {"x": torch.ones(4) * 2, "torch": torch})


@pytest.mark.parametrize("code", WAITS)
@pytest.mark.usefixtures("device")
def test_what_makes_the_host_wait_is_refused_in_the_runtime(code: str) -> None:
    with pytest.raises(HostWaitError, match=r" at runtime/stage/new\.py:1 makes the host wait"):
        run(code, f"{RUNTIME}/stage/new.py")


@pytest.mark.parametrize("code", WAITS)
@pytest.mark.usefixtures("device")
def test_layers_losses_and_models_of_the_zoo_may_wait(code: str) -> None:
    run(code, "/home/user/model.py")
    run(code, str(Path(stageline.__file__).parent / "zoo" / "new.py"))


@pytest.mark.usefixtures("device")
def test_numbers_that_are_in_host_memory_may_be_read() -> None:
    run("torch.tensor([1.0, 2.0]).sum().item() if False else torch.tensor(1.0).item()", RUNTIME)
    run("torch.equal(torch.get_rng_state(), torch.get_rng_state())", RUNTIME)


def test_between_steps_the_host_may_wait() -> None:
    (accelerator,) = accelerators_of([None], simulated=True)
    assert accelerator is not None
    with accelerator.rank_thread():
        run("float(x.sum())", f"{RUNTIME}/stage/new.py")


@pytest.mark.usefixtures("device")
def test_what_is_read_on_the_host_inside_a_step_has_a_reason() -> None:
    assert read_on_host(torch.ones(1).sum(), HostRead.FINITE_GRADIENTS) == 1.0


def test_every_reason_is_used_where_it_says() -> None:
    """The list is complete: nothing else in the runtime reads on the host inside a step."""
    places = {
        f"{path.relative_to(RUNTIME)}: {reason}"
        for path in Path(RUNTIME).rglob("*.py")
        for reason in re.findall(r"HostRead\.(\w+)", path.read_text())
    }
    assert places == {
        "exactness/layer_state.py: STATE_IN_THE_FIRST_STEP",
        "optimizers/stage_optimizers.py: FINITE_GRADIENTS",
        "optimizers/clip_after_step.py: CLIPPED_AFTER_A_STEP",
    }
    assert {place.split(": ")[1] for place in places} == set(HostRead.__members__)


class ReadsItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 1000 else x * 3


def test_a_layer_that_waits_is_the_users() -> None:
    with watched(nn.Sequential(*chain(), ReadsItsInput())) as pipe:
        pipe.step(*batches()[0])


@pytest.mark.parametrize("tied", [False, True])
def test_clipping_by_the_caller_waits_for_no_device(*, tied: bool) -> None:
    with watched(chain(tied=tied)) as pipe:
        pipe.step(*batches()[0])
        first = session_of(pipe).assembly.layout.accelerators[0]
        assert first is not None
        with first.rank_thread(lambda: (0, "clipping")):
            norm = pipe.clip_grad_norm_(0.01)
        assert float(norm) > 0.01


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Tensor]:
    """Return a list that the tensors of all later copies of a kind are added to."""
    found: list[Tensor] = []
    copy: Callable[..., Tensor] = getattr(CheckedAccelerator, name)

    def counting(self: Any, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return copy(self, tensor)

    monkeypatch.setattr(CheckedAccelerator, name, counting)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_on_device_tensors_copies_nothing_through_the_host(
    monkeypatch: pytest.MonkeyPatch, schedule: str, *, tied: bool
) -> None:
    up, down = counted(monkeypatch, "upload"), counted(monkeypatch, "download")
    with watched(chain(tied=tied), schedule=schedule) as pipe:
        pipe.step(*batches()[0])
        assert up == down == []
        pipe.eval()
        pipe(batches()[0][0])
        assert up == down == []


def test_a_batch_in_host_memory_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = counted(monkeypatch, "upload"), counted(monkeypatch, "download")
    batch = batches()[0]  # made where nothing is watched
    with watched(chain()) as pipe:
        pipe.step(*batch)
    assert len(up) == 2 * 4  # inputs and target of each micro-batch
    assert down == []

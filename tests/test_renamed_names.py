"""Names of version 0.1 still work, each with a warning that says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import stageline as sl


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 3), torch.randn(4, 3)


def build(**given: Any) -> sl.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}
    return sl.Pipeline(model, mse_loss, **sizes | given)


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ({"seed": 3}, {"options": sl.Options(seed=3)}, r"options=sl\.Options\(seed=…\)"),
        (
            {"batch_norm": "microbatch", "accumulate": "fused"},
            {"options": sl.Options(batch_norm="microbatch", accumulate="fused")},
            r"options=sl\.Options\((batch_norm|accumulate)=…\)",
        ),
        (
            {"sample": torch.zeros(2, 3)},
            {"example_inputs": torch.zeros(2, 3)},
            "write example_inputs=…",
        ),
    ],
)
def test_an_old_argument_does_what_the_new_one_does(
    old: dict[str, Any], new: dict[str, Any], advice: str
) -> None:
    with pytest.warns(DeprecationWarning, match=advice):
        before = build(**old)
    after = build(**new)
    assert torch.equal(before.step(*batch()).loss, after.step(*batch()).loss)
    assert before.balance == after.balance


def test_old_names_of_functions_make_optimizers_and_schedulers() -> None:
    with pytest.warns(DeprecationWarning, match="write (optimizer|scheduler)_fn=…"):
        pipe = build(
            optimizer=lambda params: SGD(params, 0.1), scheduler=lambda each: StepLR(each, 1, 0.5)
        )
    assert len(list(pipe.run([batch(), batch()]))) == 2
    assert [each.param_groups[0]["lr"] for each in pipe.optimizers] == [0.025, 0.025]


def test_vertical_sync_is_given_to_the_schedule() -> None:
    with pytest.warns(DeprecationWarning, match=r"build_schedule\(…, vertical_sync=…\)"):
        pipe = build(
            schedule="pipedream",
            num_microbatches=1,
            vertical_sync=True,
            optimizer_fn=lambda params: SGD(params, 0.1),
        )
    assert pipe.schedule == sl.build_schedule(
        "pipedream", num_ranks=2, num_microbatches=1, vertical_sync=True
    )


def test_an_argument_under_both_names_is_refused() -> None:
    with (
        pytest.warns(DeprecationWarning, match="write example_inputs=…"),
        pytest.raises(sl.ModelError, match=r"^sample and example_inputs were both given"),
    ):
        build(sample=torch.zeros(2, 3), example_inputs=torch.zeros(2, 3))


def test_an_argument_that_never_was_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_rank'"):
        build(num_rank=3)


def test_attributes_that_were_renamed_still_answer() -> None:
    pipe = build()
    with pytest.warns(DeprecationWarning, match=r"^Schedule\.home is deprecated: use rank_of$"):
        assert pipe.schedule.home(1, 0) == 1
    result = pipe.step(*batch())
    with pytest.warns(DeprecationWarning, match="use results"):
        assert result.told == result.results


def test_reports_of_fit_still_have_words(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = build()
    optimizer = SGD(pipe.parameters(), 0.1)
    report = sl.fit(pipe, [batch()], optimizer, steps=1)[-1]
    with pytest.warns(DeprecationWarning, match="use summary"):
        assert report.words() == report.summary
    assert report.summary in capsys.readouterr().out


def test_profiles_and_plans_still_answer_to_their_old_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given: dict[str, Any] = {"loss_fn": mse_loss, "target": torch.ones(4, 3)}
    profile = sl.profile(model, torch.ones(4, 3), repeats=1, **given)
    plan = sl.plan(profile, sl.Cluster(num_devices=2, memory="1GiB"), batch_size=4)
    with pytest.warns(DeprecationWarning, match="use description"):
        assert plan.chosen.words == plan.chosen.description
    measurement = profile.measurements[0]
    with pytest.warns(DeprecationWarning, match="use sum_over"):
        assert measurement.over(range(2), "forward") == measurement.sum_over(range(2), "forward")
    with pytest.warns(DeprecationWarning, match="use temporary_bytes"):
        assert measurement.momentary(range(2)) == measurement.temporary_bytes(range(2))

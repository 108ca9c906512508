"""Models of libraries, as they are, train as in a plain loop; benchmarks/models has many more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.models.catalogue import make_case, missing_libraries
from benchmarks.models.combination import (
    Combination,
    Trained,
    differences,
    has_dropout,
    train_and_compare,
)
from benchmarks.models.dropout import set_dropout

OF_TIMM = pytest.mark.skipif(
    bool({"timm", "torchvision"} & set(missing_libraries())), reason="timm is not installed"
)
MODELS = (  # two are tied, Mixtral has an auxiliary loss, convnext drops whole branches
    *("Llama", "T5", "Mixtral"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "BERT", "ViT")),
    pytest.param("convnext", marks=OF_TIMM),
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Leave the cores to the ranks, whose operators are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_have_the_bits_of_a_plain_loop_and_the_names_of_the_model(name: str) -> None:
    assert has_dropout(name)
    report = train_and_compare(name, Combination("1f1b", 2, "threads", dropout=True))
    model = make_case(name).model
    assert report.fault == ""
    assert sorted(report.parameters) == sorted(n for n, _ in model.named_parameters())
    assert set(report.state) == set(model.state_dict())


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("convnext", marks=OF_TIMM)])
def test_dropout_is_on_or_off_as_the_table_says(name: str) -> None:
    case = make_case(name)
    inputs, _ = case.batch(4, 0)

    def output(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        found = case.model(**inputs)["logits"] if isinstance(inputs, dict) else case.model(inputs)
        assert isinstance(found, torch.Tensor)
        return found

    set_dropout(case.model.train(), 0.5)
    assert not torch.equal(output(1), output(2))
    set_dropout(case.model, 0.0)
    assert torch.equal(output(1), output(2))


def test_one_bit_that_differs_is_a_difference() -> None:
    ones = torch.ones(2)
    wanted = Trained([(1.0, 1.0)], {"a": ones, "b": None}, {"a": ones})
    other = ones.nextafter(torch.zeros(2))
    assert list(differences(wanted, wanted)) == []
    assert list(
        differences(Trained([(1.0, 1.0)], {"a": other, "b": ones}, {"a": other}), wanted)
    ) == [
        "gradient of a differs",
        "gradient of b differs",
        "a differs",
    ]

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from stageline.errors import BatchError
from stageline.zoo.text import VOCABULARY, batch, characters, standard_library, tokens

TEXT = tokens("def f(x):\n    return x\n" * 20)


def written(numbers: torch.Tensor) -> str:
    return "".join(characters(token) for token in numbers.tolist())


def test_tokens_convert_back_to_the_text() -> None:
    text = "class A:\n    def f(self) -> None:\n        return ~1  # two\n"
    assert written(tokens(text)) == text


def test_four_spaces_are_one_token_and_a_tab_is_spaces() -> None:
    assert len(tokens(" " * 8 + "x")) == 3
    assert written(tokens("\tx")) == " " * 8 + "x"


def test_characters_that_are_no_tokens_are_omitted() -> None:
    assert written(tokens("naïve\x0c → \x1b[1mé\r\n")) == "nave  [1m\n"


def test_the_standard_library_is_a_few_million_tokens() -> None:
    text = standard_library()
    assert "class TestCase" not in text  # packages are not read, only modules
    assert "def namedtuple" not in text
    assert "def dataclass(" in text
    numbers = tokens(text)
    assert 1_000_000 < len(numbers) < 10_000_000
    assert int(numbers.max()) < VOCABULARY


def test_a_python_without_source_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(BatchError, match="holds no source files"):
        standard_library()


def test_the_target_is_the_token_after() -> None:
    inputs, target = batch(TEXT, 0, size=4, context=16)
    assert inputs.shape == target.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert all(written(row) in written(TEXT) for row in inputs)


def test_a_batch_depends_on_step_and_seed() -> None:
    first, again = batch(TEXT, 7, size=4, context=16), batch(TEXT, 7, size=4, context=16)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], batch(TEXT, 8, size=4, context=16)[0])
    assert not torch.equal(first[0], batch(TEXT, 7, size=4, context=16, seed=1)[0])


def test_batch_keeps_the_state_of_the_global_generator() -> None:
    before = torch.get_rng_state()
    batch(TEXT, 0, size=4, context=16)
    assert torch.equal(torch.get_rng_state(), before)
